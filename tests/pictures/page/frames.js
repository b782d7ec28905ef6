// From Prometheus' answers to Grafana's data frames, as Grafana's data source for Prometheus makes them: one frame for
// each series of a graph; for tables one frame for each query, with a column for the time, for each label and the value, and a row
// for each point.
import { FieldType, createDataFrame } from '@grafana/data';

const LEGEND = /\{\{\s*(.+?)\s*\}\}/g;

const points = (row) => row.values ?? [row.value];
const milliseconds = (point) => point[0] * 1000;

function seriesFrames({ refId, legendFormat, rows, step, instant }) {
  return rows.map((row) => {
    const labels = row.metric;
    const legend = legendFormat.replace(LEGEND, (_, label) => labels[label] ?? '');
    return createDataFrame({
      refId,
      name: legend,
      fields: [
        {
          name: 'Time',
          type: FieldType.time,
          values: points(row).map(milliseconds),
          config: instant ? {} : { interval: step * 1000 },
        },
        {
          name: 'Value',
          type: FieldType.number,
          values: points(row).map((point) => Number(point[1])),
          labels,
          config: { displayNameFromDS: legend },
        },
      ],
    });
  });
}

// With one query the column is called Value, with several Value #A and so on, also if one of them has no rows.
function tableFrame({ refId, rows }, valueName) {
  const labels = [...new Set(rows.flatMap((row) => Object.keys(row.metric).sort()))];
  const each = rows.flatMap((row) => points(row).map((point) => ({ labels: row.metric, point })));
  return createDataFrame({
    refId,
    fields: [
      { name: 'Time', type: FieldType.time, values: each.map(({ point }) => milliseconds(point)), config: {} },
      ...labels.map((label) => ({
        name: label,
        type: FieldType.string,
        values: each.map((row) => row.labels[label] ?? ''),
        config: { filterable: true },
      })),
      { name: valueName, type: FieldType.number, values: each.map(({ point }) => Number(point[1])), config: {} },
    ],
  });
}

/** The frames of one panel. */
export function frames(answers) {
  const tables = answers.filter((answer) => answer.format === 'table');
  return answers.flatMap((answer) =>
    answer.format === 'table'
      ? [tableFrame(answer, tables.length > 1 ? `Value #${answer.refId}` : 'Value')]
      : seriesFrames(answer)
  );
}

/** When something was: the moments of an annotation, each once. */
export function moments({ rows, useValueForTime }, from, to) {
  const times = rows.flatMap((row) => points(row).map((point) => (useValueForTime ? Number(point[1]) : milliseconds(point))));
  return [...new Set(times)].filter((time) => time >= from && time <= to);
}
