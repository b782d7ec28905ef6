// A page with one dashboard, laid out as Grafana does it: 24 columns, 30 pixels for a unit of height, gaps of 8.
import '@fontsource/inter/400.css';
import '@fontsource/inter/500.css';
import '@fontsource/roboto-mono/400.css';
import './page.css';

import { Component } from 'react';
import { createRoot } from 'react-dom/client';
import { ThemeContext, dateTime } from '@grafana/data';
import { GlobalStyles } from '@grafana/ui';

import { complain, complaints } from './complaints.js';
import { moments } from './frames.js';
import { theme } from './grafana.js';
import { Panel } from './panels.jsx';

const UNIT = 30;
const GAP = 8;
const WIDTH = 1600 - 2 * GAP;
const COLUMN = (WIDTH - 23 * GAP) / 24;

const size = (units, unit) => units * unit + (units - 1) * GAP;

/** All rows and panels with collapsed rows opened: what stands below moves down. */
function opened(panels) {
  let moved = 0;
  return panels
    .toSorted((one, other) => one.gridPos.y - other.gridPos.y)
    .flatMap((panel) => {
      const top = panel.gridPos.y + moved;
      const inner = panel.panels ?? [];
      const first = Math.min(...inner.map((each) => each.gridPos.y));
      const below = inner.map((each) => ({ ...each, gridPos: { ...each.gridPos, y: each.gridPos.y - first + top + 1 } }));
      const bottom = Math.max(top + 1, ...below.map(({ gridPos }) => gridPos.y + gridPos.h));
      moved += panel.type === 'row' ? bottom - top - 1 : 0;
      return [{ ...panel, gridPos: { ...panel.gridPos, y: top } }, ...below];
    });
}

/** A panel that throws says so, and the others are drawn. */
class Guard extends Component {
  state = {};

  static getDerivedStateFromError(error) {
    return { error };
  }

  componentDidCatch(error) {
    complain(this.props.panel, `it cannot be drawn: ${error.message}`);
  }

  render() {
    return this.state.error ? <div className="empty">cannot be drawn: {this.state.error.message}</div> : this.props.children;
  }
}

function Placed({ panel, dashboard, ...rest }) {
  const { x, y, w, h } = panel.gridPos;
  const [width, height] = [size(w, COLUMN), size(h, UNIT)];
  const style = { position: 'absolute', left: x * (COLUMN + GAP), top: y * (UNIT + GAP), width, height };
  if (panel.type === 'row') {
    return (
      <div style={style} className={panel.collapsed ? 'row collapsed' : 'row'}>
        {panel.title}
      </div>
    );
  }
  const mayBeEmpty = dashboard.mayBeEmpty.includes(panel.title);
  return (
    <div style={style} data-panel={panel.title}>
      <Guard panel={panel}>
        <Panel panel={panel} width={width} height={height} answers={dashboard.panels[panel.id]} mayBeEmpty={mayBeEmpty} {...rest} />
      </Guard>
    </div>
  );
}

function Dashboard({ dashboard }) {
  const { board, variables, from, to } = dashboard;
  const panels = opened(board.panels);
  const height = Math.max(...panels.map(({ gridPos }) => gridPos.y + gridPos.h)) * (UNIT + GAP);
  const range = { from: dateTime(from), to: dateTime(to), raw: { from: dateTime(from), to: dateTime(to) } };
  const marks = dashboard.annotations.flatMap((note) =>
    moments(note, from, to).map((time) => ({ time, color: theme.visualization.getColorByName(note.color) }))
  );
  return (
    <main style={{ width: WIDTH, padding: GAP }}>
      <header>
        <h1>{board.title}</h1>
        {variables.map(({ label, value }) => (
          <span key={label}>
            <b>{label}</b> {value}
          </span>
        ))}
      </header>
      <div style={{ position: 'relative', height }}>
        {panels.map((panel) => (
          <Placed key={panel.id} panel={panel} dashboard={dashboard} range={range} moments={marks} />
        ))}
      </div>
    </main>
  );
}

window.complaints = complaints;
// where the page ends if no collapsed row is opened
window.fold = () => document.querySelector('.collapsed')?.getBoundingClientRect().top ?? document.documentElement.scrollHeight;
window.draw = (dashboard) =>
  createRoot(document.getElementById('page')).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <Dashboard dashboard={dashboard} />
    </ThemeContext.Provider>
  );
