//! Draws the screens: the state in, characters out.

use std::collections::BTreeMap;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Paragraph, Row, Table, TableState, Wrap};

use super::state::{Screen, ScreenState};
use crate::cli::overview_source::NewestKills;
use crate::export::events::sentence;
use crate::overview::history::{Point, Track};
use crate::overview::table::{
    CONTAINERS, Cells, Kind, PROCESSES, count, full_in, growth, host_line, pair, percent, shortened, size,
};
use crate::overview::{ContainerUse, GpuOverview, Overview};
use crate::text::age;

/// Width of the bar of a limit, and of a GPU's memory.
const LIMIT_BAR: usize = 10;
const GPU_BAR: usize = 24;
/// Width of the screen from which on containers have bars.
const MIN_WIDTH_OF_BARS: usize = 60;
/// The newest kills that are listed.
const SHOWN_KILLS: usize = 3;

/// The keys, and what they do.
const KEYS: [(&str, &str); 11] = [
    ("up, down, j, k, PgUp, PgDn, Home, End", "select a container, or scroll"),
    ("Enter", "its roles, processes, who holds its GPU memory, its last hour"),
    ("w", "why it was killed, or last ended"),
    ("W", "why the newest of all kills happened, also of a container that is gone"),
    ("r", "its runs"),
    ("a", "advice for its next run"),
    ("s", "sort by: nearest to the limit, memory, GPU memory, CPU, newest kill, name"),
    ("/", "show only names that contain a text; Esc shows all again"),
    ("?", "this list"),
    ("Esc, q", "back; in the list q ends"),
    ("Ctrl-C", "end"),
];

/// Draws the screen in front.
pub fn draw(frame: &mut Frame, state: &ScreenState) {
    let [title, body, footer] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)])
            .areas(frame.area());
    draw_title(frame, title, state);
    match (state.screen(), &state.overview) {
        (Screen::Text { title, lines, from }, _) => draw_text(frame, body, title, lines, *from),
        (Screen::Help, _) => draw_help(frame, body),
        (Screen::Container { id, from }, Some(overview)) => match state.container_of(id) {
            Some(container) => draw_container(frame, body, state, container, overview, *from),
            None => {
                frame.render_widget("It does not run any more. `memledger why NAME` explains its end.", body)
            }
        },
        (_, Some(overview)) => draw_list(frame, body, state, overview),
        (_, None) => frame.render_widget(state.error.as_deref().unwrap_or("Taking two samples..."), body),
    }
    draw_footer(frame, footer, state);
}

fn draw_title(frame: &mut Frame, area: Rect, state: &ScreenState) {
    let mut spans = vec![Span::styled(format!("memledger top  {}", state.host), Modifier::BOLD)];
    if let Some(overview) = &state.overview {
        spans.push(Span::raw(format!("  {}  {} containers", time(overview.at), overview.containers.len())));
    }
    if !state.is_served {
        spans.push(Span::styled("  no memledger serve: sampled by top itself", state.theme.dim()));
    }
    if let Some(error) = &state.error {
        spans.push(Span::styled(format!("  no newer figures: {error}"), state.theme.alarm()));
    }
    frame.render_widget(Line::from(spans), area);
}

fn draw_footer(frame: &mut Frame, area: Rect, state: &ScreenState) {
    let text = match state.screen() {
        _ if state.is_filtering => format!("/{}_  Enter keeps it, Esc shows all", state.filter),
        Screen::Text { .. } => "up, down scroll  Esc back".to_owned(),
        Screen::Help => "Esc back".to_owned(),
        Screen::Container { .. } => "w why  r runs  a advise  ? help  Esc back".to_owned(),
        Screen::List => {
            let filter = if state.filter.is_empty() { String::new() } else { format!(":{}", state.filter) };
            format!(
                "Enter details  w W why  r runs  a advise  s sort:{}  / filter{filter}  ? help  q quit",
                state.sort_word()
            )
        }
    };
    frame.render_widget(Line::styled(text, state.theme.dim()), area);
}

fn draw_help(frame: &mut Frame, area: Rect) {
    let lines = KEYS.map(|(keys, does)| Line::raw(format!("  {keys:<38} {does}")));
    frame.render_widget(Paragraph::new(lines.to_vec()), area);
}

fn draw_text(frame: &mut Frame, area: Rect, title: &str, lines: &[String], from: usize) {
    let [head, body] = Layout::vertical([Constraint::Length(1), Constraint::Min(1)]).areas(area);
    frame.render_widget(Line::styled(title, Modifier::BOLD), head);
    let shown: Vec<Line<'_>> =
        lines.iter().skip(from).take(body.height.into()).map(|line| Line::raw(line.as_str())).collect();
    frame.render_widget(Paragraph::new(shown).wrap(Wrap { trim: false }), body);
}

fn draw_list(frame: &mut Frame, area: Rect, state: &ScreenState, overview: &Overview) {
    let kills = state.kills.as_ref().map_or(0, |kills| kills.events.len());
    let kill_lines = kills.min(SHOWN_KILLS) as u16 + 1;
    let gpu_lines = (overview.gpus.len() as u16).min(area.height / 3);
    let [host, gpus, containers, newest] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(gpu_lines),
        Constraint::Min(2),
        Constraint::Length(kill_lines),
    ])
    .areas(area);
    let style = state.theme.level(overview.host.used_ratio());
    frame.render_widget(Line::styled(host_line(&overview.host), style), host);
    let lines: Vec<Line<'_>> =
        overview.gpus.iter().map(|gpu| gpu_line(state, gpu, gpus.width.into())).collect();
    frame.render_widget(Paragraph::new(lines), gpus);
    draw_containers(frame, containers, state, overview.at);
    draw_kills(frame, newest, state, overview.at);
}

/// Returns a GPU with a bar of its memory, by holder.
fn gpu_line(state: &ScreenState, gpu: &GpuOverview, width: usize) -> Line<'static> {
    let theme = state.theme;
    let total = gpu.memory_total_bytes.filter(|total| *total > 0.0);
    let mut spans = vec![Span::raw(format!("GPU {:<4}", gpu.gpu))];
    let mut filled = 0;
    let holders: Vec<(&str, f64)> = gpu.all_holders().collect();
    for (number, (_, bytes)) in holders.iter().enumerate() {
        let cells = total.map_or(0, |total| (bytes / total * GPU_BAR as f64).round() as usize);
        let cells = cells.min(GPU_BAR - filled);
        filled += cells;
        spans.push(Span::styled(theme.full(Some(number)).to_string().repeat(cells), theme.holder(number)));
    }
    spans.push(Span::raw(theme.empty().to_string().repeat(GPU_BAR - filled)));
    spans.push(Span::styled(
        format!(" {}", pair(gpu.memory_used_bytes, gpu.memory_total_bytes)),
        theme.level(gpu.used_ratio()),
    ));
    spans.push(Span::raw(format!(" {} busy ", percent(gpu.utilization_ratio))));
    for (number, (name, bytes)) in holders.iter().enumerate() {
        let letter = if theme.has_color { String::new() } else { format!("{}:", theme.full(Some(number))) };
        spans.push(Span::styled(
            format!(" {letter}{} {}", shortened(name, width / 4), size(Some(*bytes))),
            theme.holder(number),
        ));
    }
    Line::from(spans)
}

fn draw_containers(frame: &mut Frame, area: Rect, state: &ScreenState, now: f64) {
    let shown = state.containers();
    if shown.is_empty() {
        let text =
            if state.filter.is_empty() { "No container is running." } else { "No name contains the filter." };
        return frame.render_widget(text, area);
    }
    let (theme, width) = (state.theme, usize::from(area.width));
    let all: Vec<ContainerUse> = shown.iter().map(|container| (*container).clone()).collect();
    let bar_width = if width >= MIN_WIDTH_OF_BARS { LIMIT_BAR + 2 } else { 0 };
    let cells = Cells::of(&CONTAINERS, &all, now, width - bar_width);
    let titles: Vec<String> = cells.columns.iter().map(|(title, _)| (*title).to_owned()).collect();
    let with_bar = |mut row: Vec<Cell<'static>>, bar: Cell<'static>| {
        if bar_width > 0 {
            row.insert(1, bar);
        }
        Row::new(row)
    };
    let rows = cells.rows.iter().zip(&shown).map(|(row, container)| {
        let bar = Cell::from(limit_bar(state, container)).style(theme.level(container.limit_ratio));
        with_bar(table_row(&cells, row), bar)
    });
    let mut widths: Vec<Constraint> =
        cells.widths.iter().map(|width| Constraint::Length(*width as u16)).collect();
    if bar_width > 0 {
        widths.insert(1, Constraint::Length(LIMIT_BAR as u16));
    }
    let header = with_bar(table_row(&cells, &titles), Cell::from("")).style(Modifier::BOLD);
    let table = Table::new(rows.collect::<Vec<_>>(), widths)
        .header(header)
        .column_spacing(2)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    let mut selection = TableState::new().with_selected(state.selected_row(&shown));
    frame.render_stateful_widget(table, area, &mut selection);
}

/// Returns the cells of a row as they fit.
fn table_row(cells: &Cells, row: &[String]) -> Vec<Cell<'static>> {
    let cell = |(number, text): (usize, &String)| {
        let line = Line::raw(cells.cut(number, text));
        Cell::from(if cells.columns[number].1 == Kind::Number {
            line.alignment(Alignment::Right)
        } else {
            line
        })
    };
    row.iter().enumerate().map(cell).collect()
}

fn limit_bar(state: &ScreenState, container: &ContainerUse) -> String {
    let full =
        container.limit_ratio.map_or(0, |ratio| (ratio.clamp(0.0, 1.0) * LIMIT_BAR as f64).round() as usize);
    let theme = state.theme;
    theme.full(None).to_string().repeat(full) + &theme.empty().to_string().repeat(LIMIT_BAR - full)
}

fn draw_kills(frame: &mut Frame, area: Rect, state: &ScreenState, now: f64) {
    let title = state.kills.as_ref().map_or("Reading the newest kills...", NewestKills::title);
    let kills = state.kills.iter().flat_map(|kills| kills.events.iter().take(SHOWN_KILLS));
    let lines: Vec<String> =
        kills.map(|kill| format!("{} ago  {}", age(now - kill.at()), sentence(kill))).collect();
    let style = if lines.is_empty() { state.theme.dim() } else { state.theme.alarm() };
    let lines = std::iter::once(Line::styled(title, style)).chain(lines.into_iter().map(Line::raw));
    frame.render_widget(Paragraph::new(lines.collect::<Vec<_>>()), area);
}

fn draw_container(
    frame: &mut Frame,
    area: Rect,
    state: &ScreenState,
    container: &ContainerUse,
    overview: &Overview,
    from: usize,
) {
    let mut lines = facts(state, container, overview);
    let graphs =
        container.history.as_ref().map(|track| graphs(state, track, area.width.into())).unwrap_or_default();
    lines.extend(graphs);
    let height = lines.len() as u16 + 1;
    let [top, processes] = Layout::vertical([Constraint::Length(height), Constraint::Min(1)]).areas(area);
    frame.render_widget(Paragraph::new(lines), top);
    let Some(list) = &container.processes else {
        return frame.render_widget("Its processes are not known.", processes);
    };
    let cells = Cells::of(&PROCESSES, list, overview.at, area.width.into());
    let titles: Vec<String> = cells.columns.iter().map(|(title, _)| (*title).to_owned()).collect();
    let widths = cells.widths.iter().map(|width| Constraint::Length(*width as u16));
    let from = from.min(cells.rows.len().saturating_sub(1));
    let shown = cells.rows.iter().skip(from).map(|row| Row::new(table_row(&cells, row)));
    let table = Table::new(shown, widths)
        .header(Row::new(table_row(&cells, &titles)).style(Modifier::BOLD))
        .column_spacing(2);
    frame.render_widget(table, processes);
}

/// Returns the lines about a container.
fn facts(state: &ScreenState, container: &ContainerUse, overview: &Overview) -> Vec<Line<'static>> {
    let theme = state.theme;
    let name = Span::styled(container.name.clone(), Modifier::BOLD);
    let short_id = container.id.get(..12).unwrap_or(&container.id);
    let since =
        container.started.map(|at| format!(", runs for {}", age(overview.at - at))).unwrap_or_default();
    let mut lines = vec![
        Line::from(vec![name, Span::raw(format!("  {} {short_id}{since}", container.runtime))]),
        Line::from(vec![
            Span::raw("memory    "),
            Span::styled(limit_bar(state, container), theme.level(container.limit_ratio)),
            Span::raw(format!(
                " {} ({}), headroom {}",
                pair(container.unreclaimable_bytes, container.limit_bytes),
                percent(container.limit_ratio),
                size(container.headroom_bytes)
            )),
        ]),
    ];
    if container.growth_bytes_per_second.is_some() {
        let grows = format!(
            "grows     {}, full in {}",
            growth(container.growth_bytes_per_second),
            full_in(container.seconds_to_limit)
        );
        lines.push(Line::styled(grows, theme.alarm()));
    }
    let counted = |role: &str, bytes: f64| match container.processes_by_role.get(role) {
        Some(count) => format!("{count:.0} {} {}", role.replace('_', " "), size(Some(bytes))),
        None => format!("{} {}", role.replace('_', " "), size(Some(bytes))),
    };
    let held = container.role_bytes.iter().filter(|(_, bytes)| **bytes > 0.0);
    let roles: Vec<String> = held.map(|(role, bytes)| counted(role, *bytes)).collect();
    if !roles.is_empty() {
        lines.push(Line::raw(format!("roles     {}", roles.join(", "))));
    }
    if let Some(bytes) = container.gpu_bytes {
        let busy = percent(container.gpu_utilization_ratio);
        lines.push(Line::raw(format!(
            "VRAM      {} ({}), {busy} busy",
            size(Some(bytes)),
            by_name(&container.gpus, "GPU ")
        )));
    }
    if !container.gpu_holder_bytes.is_empty() {
        lines.push(Line::raw(format!(
            "held by   {}",
            by_name(&container.gpu_holder_bytes, "").replace('_', " ")
        )));
    }
    let cpu = container.cpu_cores.map_or_else(|| "-".to_owned(), |cores| format!("{cores:.1} cores"));
    let last = container
        .last_oom_kill
        .map(|at| format!(", the last {} ago", age(overview.at - at)))
        .unwrap_or_default();
    lines.push(Line::raw(format!(
        "CPU       {cpu}    OOM kills {}{last}    CUDA out of memory {}",
        count(container.oom_kills),
        count(container.cuda_ooms)
    )));
    lines
}

fn by_name(amounts: &BTreeMap<String, f64>, prefix: &str) -> String {
    let each = amounts.iter().map(|(name, bytes)| format!("{prefix}{name} {}", size(Some(*bytes))));
    each.collect::<Vec<_>>().join(", ")
}

/// Returns the last hour as lines: memory, and GPU memory where there is some.
fn graphs(state: &ScreenState, track: &Track, width: usize) -> Vec<Line<'static>> {
    let width = width.saturating_sub(30).clamp(10, 120);
    let graph = |name: &str, of: fn(Point) -> Option<f64>| {
        let values = buckets(track, width, of);
        let most = values.iter().flatten().copied().reduce(f64::max).filter(|most| *most > 0.0)?;
        let points: String =
            values.iter().map(|value| state.theme.spark(value.map(|value| value / most))).collect();
        Some(Line::raw(format!("{name:<9} {points} {} at most", size(Some(most)))))
    };
    [graph("memory", Point::memory_bytes), graph("VRAM", Point::gpu_bytes)].into_iter().flatten().collect()
}

/// Returns the highest value in each of so many parts of the last hour.
fn buckets(track: &Track, count: usize, of: fn(Point) -> Option<f64>) -> Vec<Option<f64>> {
    let points: Vec<(f64, Point)> = track.timed().collect();
    let Some((newest, _)) = points.last().copied() else { return vec![] };
    let (end, span) = (newest + track.step, crate::overview::history::SPAN);
    let mut found = vec![None; count];
    for (at, point) in points {
        let number = ((at - (end - span)) / span * count as f64) as usize;
        if let (Some(value), Some(bucket)) = (of(point), found.get_mut(number)) {
            *bucket = Some(bucket.map_or(value, |most: f64| most.max(value)));
        }
    }
    found
}

/// Formats a time of day.
pub fn time(at: f64) -> String {
    let time = Timestamp::from_millisecond((at * 1e3) as i64).unwrap_or_default();
    time.to_zoned(TimeZone::system()).strftime("%H:%M:%S").to_string()
}
