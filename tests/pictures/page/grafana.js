// What a Grafana server's own pages set up before a panel is drawn: the registries of field options, of the panels'
// own options and of transformations.
//
// The field options and their defaults stand in Grafana's application, which is in no package; they are named here. An
// option of a dashboard that is not among them is complained of, since Grafana would ignore it without a word.
import {
  PanelPlugin,
  Registry,
  booleanOverrideProcessor,
  createTheme,
  dataLinksOverrideProcessor,
  displayNameOverrideProcessor,
  fieldMatchers,
  getFieldDisplayName,
  getValueFormats,
  identityOverrideProcessor,
  numberOverrideProcessor,
  standardFieldConfigEditorRegistry,
  standardTransformers,
  standardTransformersRegistry,
  stringOverrideProcessor,
  thresholdsOverrideProcessor,
  unitOverrideProcessor,
  valueMappingsOverrideProcessor,
} from '@grafana/data';

import { complain } from './complaints.js';

export const theme = createTheme({ colors: { mode: 'dark' } });

const STANDARD = {
  unit: unitOverrideProcessor,
  min: numberOverrideProcessor,
  max: numberOverrideProcessor,
  fieldMinMax: booleanOverrideProcessor,
  decimals: numberOverrideProcessor,
  displayName: displayNameOverrideProcessor,
  color: identityOverrideProcessor,
  noValue: stringOverrideProcessor,
  links: dataLinksOverrideProcessor,
  mappings: valueMappingsOverrideProcessor,
  thresholds: thresholdsOverrideProcessor,
  filterable: booleanOverrideProcessor,
};

// by type of panel: options of a field, with Grafana's default
const CUSTOM = {
  timeseries: {
    drawStyle: 'line',
    lineWidth: 1,
    lineStyle: undefined,
    lineInterpolation: 'linear',
    fillOpacity: 0,
    gradientMode: 'none',
    showPoints: 'auto',
    pointSize: 5,
    barAlignment: 0,
    spanNulls: false,
    insertNulls: false,
    axisPlacement: 'auto',
    axisLabel: '',
    axisColorMode: 'text',
    axisBorderShow: false,
    axisCenteredZero: false,
    axisSoftMin: undefined,
    axisSoftMax: undefined,
    scaleDistribution: { type: 'linear' },
    hideFrom: { tooltip: false, viz: false, legend: false },
    stacking: { mode: 'none', group: 'A' },
    thresholdsStyle: { mode: 'off' },
  },
  'state-timeline': {
    lineWidth: 0,
    fillOpacity: 70,
    spanNulls: false,
    insertNulls: false,
    hideFrom: { tooltip: false, viz: false, legend: false },
  },
  table: {
    width: undefined,
    minWidth: undefined,
    align: 'auto',
    cellOptions: { type: 'auto' },
    inspect: false,
    filterable: undefined,
    hidden: undefined,
  },
  stat: {},
  bargauge: {},
};

CUSTOM.trend = CUSTOM.timeseries;

const editor = () => null;

standardFieldConfigEditorRegistry.setInit(() =>
  Object.entries(STANDARD).map(([id, process]) => ({
    id,
    path: id,
    name: id,
    editor,
    override: editor,
    process,
    shouldApply: () => true,
    settings: id === 'links' ? {} : undefined,
  }))
);

standardTransformersRegistry.setInit(() =>
  Object.values(standardTransformers)
    .filter(({ id }, index, every) => every.findIndex((other) => other.id === id) === index)
    .map((transformation) => ({ id: transformation.id, name: transformation.name, transformation, editor }))
);

const plugins = new Registry(() =>
  Object.entries(CUSTOM).map(([id, options]) => {
    const plugin = new PanelPlugin(null).useFieldConfig({
      useCustomConfig: (builder) => {
        for (const [path, defaultValue] of Object.entries(options)) {
          const process = identityOverrideProcessor;
          builder.addCustomEditor({ id: path, path, name: path, editor, override: editor, process, shouldApply: () => true, defaultValue });
        }
      },
    });
    plugin.meta = { id, name: id };
    return { id, name: id, plugin };
  })
);

/** The options that fields can have in this type of panel. */
export const fieldOptions = (type) => plugins.get(type).plugin.fieldConfigRegistry;

const isThere = (type) => plugins.getIfExists(type) !== undefined;

/** Field options of a panel with Grafana's defaults below them. */
export function fieldConfig(panel) {
  const { defaults, overrides } = panel.fieldConfig;
  return { defaults: { ...defaults, custom: { ...CUSTOM[panel.type], ...defaults.custom } }, overrides };
}

const UNITS = new Set(getValueFormats().flatMap((category) => category.submenu.map((unit) => unit.value)));

function checkUnit(panel, unit) {
  if (unit !== undefined && !UNITS.has(unit)) {
    complain(panel, `Grafana knows no unit ${unit}`);
  }
}

/** Complains of options that Grafana would ignore. */
export function checkOptions(panel) {
  if (!isThere(panel.type)) {
    return complain(panel, `a panel of type ${panel.type} cannot be drawn`);
  }
  const known = fieldOptions(panel.type);
  const { defaults, overrides } = panel.fieldConfig;
  checkUnit(panel, defaults.unit);
  const given = [
    ...Object.keys(defaults).filter((id) => id !== 'custom'),
    ...Object.keys(defaults.custom ?? {}).map((id) => `custom.${id}`),
    ...overrides.flatMap((override) => override.properties.map((property) => property.id)),
  ];
  for (const id of given.filter((each) => !known.getIfExists(each))) {
    complain(panel, `Grafana ignores the field option ${id}`);
  }
  for (const { matcher, properties } of overrides) {
    if (!fieldMatchers.getIfExists(matcher.id)) {
      complain(panel, `Grafana has no matcher ${matcher.id}`);
    }
    properties.filter((property) => property.id === 'unit').forEach((property) => checkUnit(panel, property.value));
  }
  for (const { id } of panel.transformations ?? []) {
    if (!standardTransformersRegistry.getIfExists(id)) {
      complain(panel, `Grafana has no transformation ${id}`);
    }
  }
}

// Labels of containers in pods and of hosts in clusters, and their columns: where no row has one, there is no such column, and Grafana
// puts nothing into the link.
const OPTIONAL = { Cluster: 'cluster', Namespace: 'k8s_namespace_name', Pod: 'k8s_pod_name' };

/** Complains of overrides that meet no column, and of links that name none. */
export function checkColumns(panel, frames) {
  const namesOf = (frame) => frame.fields.flatMap((field) => [field.name, getFieldDisplayName(field, frame, frames)]);
  const names = new Set(frames.flatMap(namesOf));
  const isMissing = (name) => {
    const label = OPTIONAL[name] ?? name;
    return !names.has(name) && (names.has(label) || !Object.values(OPTIONAL).includes(label));
  };
  for (const { matcher, properties } of panel.fieldConfig.overrides) {
    if (matcher.id === 'byName' && isMissing(matcher.options)) {
      complain(panel, `an override is for ${matcher.options}, but there are ${[...names].join(', ')}`);
    }
    const links = properties.filter((property) => property.id === 'links').flatMap((property) => property.value);
    for (const [, plain, quoted] of JSON.stringify(links).matchAll(/__data\.fields(?:\.(\w+)|\[\\"(.+?)\\"\])/g)) {
      if (isMissing(plain ?? quoted)) {
        complain(panel, `a link takes ${plain ?? quoted} of the row, which has none`);
      }
    }
  }
}
