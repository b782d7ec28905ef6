// One panel of a dashboard, drawn by the component that draws it in Grafana.
import { useEffect, useState } from 'react';
import {
  FieldType,
  applyFieldOverrides,
  applyNullInsertThreshold,
  getDisplayValueAlignmentFactors,
  getFieldDisplayName,
  getFieldDisplayValues,
  isLikelyAscendingVector,
  nullToValue,
  outerJoinDataFrames,
  renderMarkdown,
  transformDataFrame,
} from '@grafana/data';
import { BarGauge, BigValue, PanelChrome, Table, TimeSeries, VizRepeater } from '@grafana/ui';

import { complain } from './complaints.js';
import { frames } from './frames.js';
import { checkColumns, checkOptions, fieldConfig, fieldOptions, theme } from './grafana.js';
import { Marks } from './marks.jsx';
import { StateTimeline } from './timeline.jsx';

// links are built of these; a picture has none
const replaceVariables = (text) => text;
const timeZone = 'utc';

/** Frames as the panel gets them: transformed, and with the options of their fields. */
function usePrepared(panel, answers) {
  const [prepared, setPrepared] = useState();
  useEffect(() => {
    const context = { interpolate: replaceVariables };
    const subscription = transformDataFrame(panel.transformations ?? [], frames(answers), context).subscribe((data) =>
      setPrepared(
        applyFieldOverrides({
          data,
          fieldConfig: fieldConfig(panel),
          fieldConfigRegistry: fieldOptions(panel.type),
          replaceVariables,
          theme,
          timeZone,
        })
      )
    );
    return () => subscription.unsubscribe();
  }, [panel, answers]);
  return prepared;
}

function checkLegends(panel, data) {
  const taken = new Set();
  for (const frame of data) {
    for (const field of frame.fields.filter((each) => each.type === FieldType.number)) {
      const name = getFieldDisplayName(field, frame, data);
      if (taken.has(name)) {
        complain(panel, `two series are called ${name}`);
      }
      if (name === '' || name.includes('{')) {
        complain(panel, `a series is called ${JSON.stringify(name)}`);
      }
      taken.add(name);
    }
  }
}

/** Where samples are missing there are none: Grafana's panel does this before it draws. */
function withGaps(frame, range) {
  const [refFieldPseudoMin, refFieldPseudoMax] = [range.from.valueOf(), range.to.valueOf()];
  return nullToValue(applyNullInsertThreshold({ frame, refFieldPseudoMin, refFieldPseudoMax }));
}

function Graph({ panel, data, width, height, moments, range }) {
  const [gapped] = useState(() => data.map((frame) => withGaps(frame, range)));
  const marks = (config) => <Marks config={config} moments={moments} />;
  return (
    <TimeSeries
      frames={gapped}
      width={width}
      height={height}
      timeRange={range}
      timeZone={timeZone}
      legend={panel.options.legend}
      options={panel.options}
    >
      {marks}
    </TimeSeries>
  );
}

const isNumber = (field) => field.type === FieldType.number;

/** A graph over another number than the time: the first column of one frame. */
function Trend({ panel, data, width, height, range }) {
  if (data.length > 1) {
    complain(panel, `${data.length} frames, of which Grafana draws none`);
  }
  const [x] = data[0].fields;
  if (!isNumber(x) || !isLikelyAscendingVector(x.values)) {
    complain(panel, `its first column, ${x.name}, is not a number that rises`);
  }
  checkColumns(panel, data);
  return (
    <TimeSeries
      frames={data}
      width={width}
      height={height}
      timeRange={range}
      timeZone={timeZone}
      legend={panel.options.legend}
      options={panel.options}
      preparePlotFrame={(frames) => outerJoinDataFrames({ frames, joinBy: (field) => field === x, keep: isNumber, keepOriginIndices: true })}
    />
  );
}

function displayValues(panel, data) {
  return getFieldDisplayValues({
    fieldConfig: fieldConfig(panel),
    reduceOptions: panel.options.reduceOptions,
    replaceVariables,
    theme,
    data,
    timeZone,
  });
}

function Stat({ panel, data, width, height }) {
  const { options } = panel;
  return (
    <VizRepeater
      width={width}
      height={height}
      source={data}
      renderCounter={0}
      itemSpacing={3}
      autoGrid
      orientation={options.orientation}
      getValues={() => displayValues(panel, data)}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={({ value, width, height, count, alignmentFactors }) => (
        <BigValue
          value={value.display}
          width={width}
          height={height}
          count={count}
          theme={theme}
          text={options.text}
          colorMode={options.colorMode}
          graphMode={options.graphMode}
          justifyMode={options.justifyMode}
          textMode={options.textMode}
          alignmentFactors={alignmentFactors}
          disableWideLayout={!options.wideLayout}
        />
      )}
    />
  );
}

// bars whose sizes the dashboard leaves to Grafana
const AUTOMATIC = { minVizWidth: 8, minVizHeight: 16, maxVizHeight: 300 };

function Bars({ panel, data, width, height }) {
  const { options } = panel;
  const { minVizWidth, minVizHeight, maxVizHeight } = options.sizing === 'manual' ? options : AUTOMATIC;
  return (
    <VizRepeater
      width={width}
      height={height}
      source={data}
      renderCounter={0}
      itemSpacing={10}
      minVizWidth={minVizWidth}
      minVizHeight={minVizHeight}
      maxVizHeight={maxVizHeight}
      orientation={options.orientation}
      getValues={() => displayValues(panel, data)}
      getAlignmentFactors={getDisplayValueAlignmentFactors}
      renderValue={({ value, width, height, orientation, alignmentFactors }) => (
        <BarGauge
          value={value.display}
          field={value.field}
          display={value.view?.getFieldDisplayProcessor(value.colIndex)}
          width={width}
          height={height}
          orientation={orientation}
          theme={theme}
          text={options.text}
          itemSpacing={10}
          lcdCellWidth={12}
          displayMode={options.displayMode}
          showUnfilled={options.showUnfilled}
          valueDisplayMode={options.valueMode}
          namePlacement={options.namePlacement}
          alignmentFactors={alignmentFactors}
        />
      )}
    />
  );
}

function Rows({ panel, data, width, height }) {
  const { options } = panel;
  checkColumns(panel, data);
  return (
    <Table
      data={data[0]}
      width={width}
      height={height}
      noHeader={!options.showHeader}
      showTypeIcons={options.showTypeIcons}
      initialSortBy={options.sortBy}
      footerOptions={options.footer}
      cellHeight={options.cellHeight}
      resizable
      fieldConfig={fieldConfig(panel)}
    />
  );
}

function Text({ panel }) {
  return <div className="markdown-html" dangerouslySetInnerHTML={{ __html: renderMarkdown(panel.options.content) }} />;
}

function Empty({ children }) {
  return <div className="empty">{children}</div>;
}

const DRAWN = { timeseries: Graph, trend: Trend, stat: Stat, bargauge: Bars, table: Rows, 'state-timeline': StateTimeline };
const SERIES = new Set(['timeseries', 'trend', 'bargauge', 'state-timeline']);

function Content({ panel, answers, mayBeEmpty, ...rest }) {
  const prepared = usePrepared(panel, answers);
  if (!prepared) {
    return null;
  }
  const data = prepared.filter((frame) => frame.length > 0);
  if (data.length === 0 && !mayBeEmpty) {
    complain(panel, 'it has no data');
  }
  if (data.length === 0 && panel.type !== 'stat') {
    return <Empty>{panel.fieldConfig.defaults.noValue ?? 'No data'}</Empty>;
  }
  if (SERIES.has(panel.type)) {
    checkLegends(panel, data);
  }
  if (panel.type === 'table' && data.length > 1) {
    complain(panel, `${data.length} tables, of which Grafana shows the first`);
  }
  const Drawn = DRAWN[panel.type];
  return <Drawn panel={panel} data={data} {...rest} />;
}

function drawn(panel, rest) {
  if (panel.type === 'text') {
    return () => <Text panel={panel} />;
  }
  checkOptions(panel);
  if (!DRAWN[panel.type]) {
    return () => <Empty>a panel of type {panel.type} cannot be drawn here</Empty>;
  }
  return (width, height) => <Content panel={panel} width={width} height={height} {...rest} />;
}

/** A panel in its frame. */
export function Panel({ panel, width, height, ...rest }) {
  return (
    <PanelChrome title={panel.title} description={panel.description} width={width} height={height}>
      {drawn(panel, rest)}
    </PanelChrome>
  );
}
