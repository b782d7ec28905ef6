// Annotations as Grafana marks them in a graph: a dashed line, with a triangle at its foot. Grafana's own plugin for that
// stands in its application and is in no package.
import { useLayoutEffect } from 'react';

function draw(u, { time, color }) {
  const x = Math.round(u.valToPos(time, 'x', true));
  const { left, top, width, height } = u.bbox;
  if (x < left || x > left + width) {
    return;
  }
  const { ctx } = u;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = color;
  ctx.lineWidth = 2;
  ctx.setLineDash([5, 5]);
  ctx.beginPath();
  ctx.moveTo(x, top);
  ctx.lineTo(x, top + height);
  ctx.stroke();
  ctx.beginPath();
  ctx.moveTo(x - 5, top + height + 6);
  ctx.lineTo(x + 5, top + height + 6);
  ctx.lineTo(x, top + height);
  ctx.fill();
  ctx.restore();
}

/** Marks for `moments` ({ time, color }) in the graph that `config` builds. */
export function Marks({ config, moments }) {
  useLayoutEffect(() => {
    config.addHook('draw', (u) => moments.forEach((moment) => draw(u, moment)));
  }, [config, moments]);
  return null;
}
