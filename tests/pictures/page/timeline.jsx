// A state timeline. Grafana's own stands in its application and is in no package, so this is a substitute, and says so in
// the picture; colours and words of the states are those that Grafana's field options give.
import { FieldType, dateTimeFormat, formattedValueToString, getFieldDisplayName } from '@grafana/data';
import { measureText } from '@grafana/ui';

const AXIS = 34;
const TICKS = 5;

/** Runs of equal states of one field: from, to, how it is shown. */
function states(frame, field, end) {
  const time = frame.fields.find((each) => each.type === FieldType.time);
  const step = time.config.interval;
  const runs = [];
  field.values.forEach((value, index) => {
    const from = time.values[index];
    const last = runs.at(-1);
    if (last && last.value === value && from - last.to < 2 * step) {
      last.to = Math.min(from + step, end);
    } else {
      runs.push({ value, from, to: Math.min(from + step, end), shown: field.display(value) });
    }
  });
  return runs;
}

/** Pixels that the longest name takes. */
const widthOf = (names) => Math.max(...names.map((name) => measureText(name, 12).width)) + 16;

function Row({ name, runs, y, height, left, place }) {
  return (
    <g>
      <text x={left - 8} y={y + height / 2} dominantBaseline="middle" textAnchor="end">
        {name}
      </text>
      {runs.map(({ from, to, shown }) => (
        <rect
          key={from}
          x={place(from)}
          width={Math.max(place(to) - place(from), 1)}
          y={y}
          height={height}
          fill={shown.color}
          fillOpacity={0.7}
        >
          <title>{formattedValueToString(shown)}</title>
        </rect>
      ))}
    </g>
  );
}

export function StateTimeline({ panel, data, width, height, range }) {
  const [from, to] = [range.from.valueOf(), range.to.valueOf()];
  const rows = data.flatMap((frame) =>
    frame.fields
      .filter((field) => field.type === FieldType.number)
      .map((field) => ({ name: getFieldDisplayName(field, frame, data), runs: states(frame, field, to) }))
  );
  const left = widthOf(rows.map(({ name }) => name));
  const place = (time) => left + ((Math.max(time, from) - from) / (to - from)) * (width - left);
  const each = (height - AXIS) / rows.length;
  const ticks = Array.from({ length: TICKS }, (_, index) => from + ((index + 0.5) / TICKS) * (to - from));
  return (
    <svg width={width} height={height} className="timeline">
      {rows.map(({ name, runs }, index) => (
        <Row key={name} name={name} runs={runs} left={left} place={place} y={each * index} height={each * panel.options.rowHeight} />
      ))}
      {ticks.map((time) => (
        <text key={time} x={place(time)} y={height - AXIS + 10} textAnchor="middle">
          {dateTimeFormat(time, { format: 'HH:mm:ss', timeZone: 'utc' })}
        </text>
      ))}
      <text x={width} y={height - 4} textAnchor="end" className="substitute">
        drawn by a substitute: Grafana's timeline is in no package
      </text>
    </svg>
  );
}
