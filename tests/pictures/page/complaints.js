// What is wrong with a dashboard as it would be drawn; draw.mjs fails if there is anything.

const said = [];

/** A complaint, with the panel's title. */
export function complain(panel, what) {
  said.push(`${panel.title}: ${what}`);
}

export const complaints = () => [...new Set(said)];
