// Draws dashboards from the answers that ask.py has written: `node draw.mjs ANSWERS FOLDER [BOARD...]`.
//
// The page is bundled by esbuild and opened in a Chromium without a screen ($CHROMIUM, else Debian's). Collapsed rows are
// drawn and looked at, but cut off the picture, as a browser opens the page without them; $WHOLE=1 leaves them on.
//
// It exits with 1, and says which panel it is, if one cannot be drawn, has no data, has two series of one name, or has an
// option that Grafana would ignore; the pictures are written all the same, to be looked at.
import { createServer } from 'node:http';
import { readFile, writeFile, mkdir } from 'node:fs/promises';
import { dirname, extname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

import { build } from 'esbuild';
import puppeteer from 'puppeteer-core';

const HERE = dirname(fileURLToPath(import.meta.url));
const TYPES = { '.svg': 'image/svg+xml', '.js': 'text/javascript', '.css': 'text/css', '.html': 'text/html' };
const PAGE = `<!doctype html><meta charset="utf-8"><link rel="stylesheet" href="/main.css">
  <div id="page"></div><script src="/main.js"></script>`;
// whose parts are used one by one, so that what no panel needs stays out
const GRAFANA = Object.fromEntries(['ui', 'data'].map((name) => [`@grafana/${name}`, join(HERE, `node_modules/@grafana/${name}`)]));

const ICONS = join(GRAFANA['@grafana/ui'], 'dist/public');

/** The packages have to be those of the Grafana that we ship. */
async function checkVersions() {
  const [, shipped] = (await readFile(join(HERE, '../../deploy/services.yml'), 'utf8')).match(/image: grafana\/grafana:(\S+)/);
  for (const [name, folder] of Object.entries(GRAFANA)) {
    const { version } = JSON.parse(await readFile(join(folder, 'package.json')));
    if (version !== shipped) {
      throw new Error(`${name} is ${version}, and deploy/services.yml has Grafana ${shipped}: change tests/pictures/package.json`);
    }
  }
}

async function bundle() {
  const { outputFiles } = await build({
    entryPoints: [join(HERE, 'page/main.jsx')],
    bundle: true,
    write: false,
    outdir: '/',
    jsx: 'automatic',
    mainFields: ['browser', 'module', 'main'],
    // an editor that no panel has, and what is there under Node alone
    external: ['monaco-editor', 'stream'],
    alias: Object.fromEntries(Object.entries(GRAFANA).map(([name, folder]) => [name, join(folder, 'dist/esm/index.js')])),
    define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
    loader: { '.woff2': 'dataurl', '.woff': 'dataurl', '.svg': 'dataurl', '.png': 'dataurl' },
    logLevel: 'error',
  });
  return Object.fromEntries(outputFiles.map((file) => [file.path, file.contents]));
}

/** Serves the page, and the icons that Grafana's components fetch. */
async function serve(files) {
  const server = createServer(async (request, response) => {
    const path = new URL(request.url, 'http://localhost').pathname;
    try {
      const body = path === '/' ? PAGE : files[path] ?? (await readFile(join(ICONS, path.replace(/^\/public/, ''))));
      response.writeHead(200, { 'content-type': TYPES[extname(path) || '.html'] ?? 'application/octet-stream' }).end(body);
    } catch {
      response.writeHead(404).end();
    }
  });
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  return server;
}

/** One dashboard, drawn; returns what is wrong with it. */
async function picture(browser, address, dashboard, file) {
  const page = await browser.newPage();
  const errors = [];
  page.on('pageerror', (error) => errors.push(`the page: ${error.message}`));
  await page.setViewport({ width: 1600, height: 1000 });
  await page.goto(address);
  await page.evaluate((given) => window.draw(given), dashboard);
  await page.evaluate(() => document.fonts.ready);
  await page.waitForNetworkIdle({ idleTime: 1000 });
  const height = await page.evaluate(() => document.documentElement.scrollHeight);
  await page.setViewport({ width: 1600, height });
  await page.waitForNetworkIdle({ idleTime: 500 });
  const fold = process.env.WHOLE ? height : await page.evaluate(() => window.fold());
  await writeFile(file, await page.screenshot({ type: 'png', clip: { x: 0, y: 0, width: 1600, height: fold } }));
  const complaints = await page.evaluate(() => window.complaints());
  await page.close();
  return [...errors, ...complaints];
}

const [answers, folder, ...wanted] = process.argv.slice(2);
const dashboards = Object.entries(JSON.parse(await readFile(answers))).filter(([name]) => !wanted.length || wanted.includes(name));
await mkdir(folder, { recursive: true });
await checkVersions();
const server = await serve(await bundle());
const browser = await puppeteer.launch({
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
  args: ['--no-sandbox', '--disable-gpu', '--hide-scrollbars'],
});
let wrong = 0;
try {
  for (const [name, dashboard] of dashboards) {
    const file = join(folder, `${name}.png`);
    const complaints = await picture(browser, `http://127.0.0.1:${server.address().port}/`, dashboard, file);
    complaints.forEach((complaint) => console.log(`${name}.json ${complaint}`));
    wrong += complaints.length;
    console.log(`${file}: ${complaints.length} complaints`);
  }
} finally {
  await browser.close();
  server.close();
}
process.exit(wrong ? 1 : 0);
