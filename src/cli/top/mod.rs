//! `memledger top`: who uses RAM and VRAM, live, who is next, and who was killed.
//!
//! Threads of their own read keys, overviews and newest kills, and send them to the one that draws: a driver or a service
//! that hangs leaves the keys working.

mod draw;
mod state;
#[cfg(test)]
mod tests;
mod theme;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use anyhow::bail;
use clap::{ArgMatches, Command};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEvent, KeyEventKind};

use super::overview_source::{NewestKills, OverviewSource};
use super::ps::{sort_flag, sort_of};
use crate::config::Config;
use crate::overview::{Details, Overview};
use state::{KeyAction, ScreenState};
use theme::Theme;

/// Time between two overviews.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time between two readings of the newest kills.
const KILLS_INTERVAL: Duration = Duration::from_secs(10);
/// Longest output of a command that is shown, in bytes.
const MAX_OUTPUT: usize = 1 << 20;
/// Events that wait for the thread that draws.
const QUEUED_EVENTS: usize = 64;
/// How long the end waits for the other threads.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a signal waits for the end, which a terminal that takes nothing blocks. Longer than an ordinary end takes.
const FORCED_EXIT_AFTER: Duration = Duration::from_secs(4);

/// Returns the verb with its own flags; the flags of the settings are added elsewhere.
pub fn command() -> Command {
    Command::new("top")
        .about("Watch which containers use RAM and VRAM, who runs out next, and who was killed.")
        .after_help(
            "Queries memledger serve; without one it samples this host itself. `?` lists the keys. For scripts: memledger ps --json.\n\
             Exit status: 0 when it is ended, 2 wrong use, 3 there is no terminal, or nothing can be sampled.",
        )
        .arg(sort_flag())
}

/// What the thread that draws receives from the others.
enum ScreenEvent {
    Key(KeyEvent),
    Resized,
    Overview(Result<Overview, String>),
    Kills(NewestKills),
    /// The output of a command, with its title.
    Output(String, String),
    /// A signal came, or the terminal is gone.
    Quit,
}

pub fn run(config: &Config, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        bail!(
            "top needs a terminal; `memledger ps` prints the same once (docker exec and kubectl exec need -it)"
        );
    }
    let source = OverviewSource::open(config)?;
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut state = ScreenState::new(host, source.is_served(), sort_of(matches), Theme::from_environment());
    state.set_overview(Ok(source.overview(Details::None)?));
    // bounded: a terminal that takes nothing must not let events pile up
    let (sender, events) = mpsc::sync_channel(QUEUED_EVENTS);
    let wanted = Arc::new(Wanted::default());
    watch_signals(sender.clone())?;
    let (stopped, has_stopped) = mpsc::sync_channel(1);
    spawn("overview", {
        let (wanted, sender) = (Arc::clone(&wanted), sender.clone());
        move || {
            fetch_overviews(&source, &wanted, &sender);
            drop(source); // ends what it started
            let _ = stopped.send(());
        }
    })?;
    spawn("kills", {
        let (sender, config) = (sender.clone(), config.clone());
        move || fetch_kills(&config, &sender)
    })?;
    let mut screen = OpenScreen::new()?;
    spawn("keys", {
        let sender = sender.clone();
        move || read_keys(&sender)
    })?;
    draw_until_quit(&mut screen.terminal, &mut state, &events, &sender, &wanted)?;
    drop((screen, events));
    wanted.stop();
    let _ = has_stopped.recv_timeout(STOP_TIMEOUT);
    Ok(ExitCode::SUCCESS)
}

/// The terminal while it shows the screens; as it was before when this is dropped, and before a panic is printed.
struct OpenScreen {
    terminal: DefaultTerminal,
}

impl OpenScreen {
    fn new() -> std::io::Result<Self> {
        Ok(Self { terminal: ratatui::try_init()? })
    }
}

impl Drop for OpenScreen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body).map(drop)
}

/// Draws after each event, until the end.
fn draw_until_quit(
    terminal: &mut DefaultTerminal,
    state: &mut ScreenState,
    events: &Receiver<ScreenEvent>,
    sender: &SyncSender<ScreenEvent>,
    wanted: &Wanted,
) -> anyhow::Result<()> {
    loop {
        if terminal.draw(|frame| draw::draw(frame, state)).is_err() {
            return Ok(()); // the terminal is gone
        }
        let Ok(first) = events.recv() else { return Ok(()) };
        // what came meanwhile is drawn at once
        for event in std::iter::once(first).chain(events.try_iter()) {
            let action = match event {
                ScreenEvent::Key(key) => state.press(key),
                ScreenEvent::Quit => return Ok(()),
                ScreenEvent::Resized => KeyAction::None,
                ScreenEvent::Overview(overview) => {
                    state.set_overview(overview);
                    KeyAction::None
                }
                ScreenEvent::Kills(kills) => {
                    state.kills = Some(kills);
                    KeyAction::None
                }
                ScreenEvent::Output(title, text) => {
                    state.set_output(&title, &text);
                    KeyAction::None
                }
            };
            match action {
                KeyAction::None => {}
                KeyAction::Quit => return Ok(()),
                KeyAction::RunCommand(verb, container) => run_command(verb, container, sender.clone())?,
            }
        }
        wanted.set(state.container().map(str::to_owned));
    }
}

/// The container whose details the screen shows.
#[derive(Default)]
struct Wanted {
    state: Mutex<(Option<String>, bool)>,
    changed: Condvar,
}

impl Wanted {
    fn set(&self, id: Option<String>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.0 != id {
            state.0 = id;
            self.changed.notify_all();
        }
    }

    /// Nothing is wanted any more.
    fn stop(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
        self.changed.notify_all();
    }

    /// Waits until another container than `last` is wanted, or this time has passed, and returns it; an error at the end.
    fn next(&self, last: &Option<String>, timeout: Duration) -> Result<Option<String>, ()> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |state: &mut (Option<String>, bool)| state.0 == *last && !state.1;
        let waited = self.changed.wait_timeout_while(state, timeout, is_same);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.1 { Err(()) } else { Ok(state.0.clone()) }
    }
}

fn fetch_overviews(source: &OverviewSource, wanted: &Wanted, sender: &SyncSender<ScreenEvent>) {
    let mut last = None;
    while let Ok(id) = wanted.next(&last, INTERVAL) {
        let details = id.as_deref().map_or(Details::None, Details::One);
        let overview = source.overview(details).map_err(|error| format!("{error:#}"));
        if sender.send(ScreenEvent::Overview(overview)).is_err() {
            return;
        }
        last = id;
    }
}

fn fetch_kills(config: &Config, sender: &SyncSender<ScreenEvent>) {
    while sender.send(ScreenEvent::Kills(NewestKills::read(config))).is_ok() {
        std::thread::sleep(KILLS_INTERVAL);
    }
}

fn read_keys(sender: &SyncSender<ScreenEvent>) {
    loop {
        let message = match event::read() {
            Ok(Event::Key(key)) if key.kind != KeyEventKind::Release => ScreenEvent::Key(key),
            Ok(Event::Resize(..)) => ScreenEvent::Resized,
            Ok(_) => continue,
            Err(_) => ScreenEvent::Quit,
        };
        let is_last = matches!(message, ScreenEvent::Quit);
        if sender.send(message).is_err() || is_last {
            return;
        }
    }
}

/// Ends the screen in order where a signal ends this process: also where its terminal is closed.
fn watch_signals(sender: SyncSender<ScreenEvent>) -> anyhow::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let guard = runtime.enter();
    let kinds = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup(), SignalKind::quit()];
    let signals: Vec<_> = kinds
        .into_iter()
        .map(|kind| Ok((signal(kind)?, kind.as_raw_value())))
        .collect::<std::io::Result<_>>()?;
    drop(guard);
    spawn("signals", move || {
        let number = runtime.block_on(async move {
            let waiting = signals.into_iter().map(|(mut signal, number)| {
                Box::pin(async move {
                    signal.recv().await;
                    number
                })
            });
            futures_util::future::select_all(waiting).await.0
        });
        let _ = sender.try_send(ScreenEvent::Quit);
        std::thread::sleep(FORCED_EXIT_AFTER);
        #[allow(clippy::disallowed_methods)] // main waits for a terminal that takes nothing
        std::process::exit(128 + number);
    })?;
    Ok(())
}

/// Runs another command of memledger, and sends its output. It has the settings of this one's command line that it knows.
fn run_command(
    verb: &'static str,
    container: Option<(String, String)>,
    sender: SyncSender<ScreenEvent>,
) -> std::io::Result<()> {
    let title = state::title(verb, container.as_ref().map(|(name, _)| name.as_str()));
    spawn("command", move || {
        let run = || {
            let mut command = std::process::Command::new(std::env::current_exe()?);
            command.arg(verb).args(settings_for(verb, std::env::args().skip(2)));
            // an id means one container; runs are recorded by name
            let subject = container.map(|(name, id)| if verb == "why" { id } else { name });
            command.arg("--").args(subject).stdin(std::process::Stdio::null()).output()
        };
        let text = match run() {
            Ok(output) => {
                let all = [output.stdout, output.stderr].concat();
                String::from_utf8_lossy(&all[..all.len().min(MAX_OUTPUT)]).into_owned()
            }
            Err(error) => format!("memledger could not be started: {error}"),
        };
        let _ = sender.send(ScreenEvent::Output(title, text));
    })
}

/// Returns the settings of a command line that a verb knows too: `why` all but those of sampling, the others where the ledger is.
fn settings_for(verb: &str, arguments: impl Iterator<Item = String>) -> Vec<String> {
    const LEDGER: [&str; 4] = ["--config.file", "--local.socket", "--state.path", "--log."];
    const SAMPLING: [&str; 4] = ["--gpu.", "--collector.", "--no-collector.", "--sort"];
    let begins = |name: &str, with: &[&str]| with.iter().any(|begin| name.starts_with(begin));
    let is_known = |name: &str| if verb == "why" { !begins(name, &SAMPLING) } else { begins(name, &LEDGER) };
    let mut found = Vec::new();
    let mut is_kept = false;
    for argument in arguments {
        if argument.starts_with("--") {
            is_kept = is_known(argument.split('=').next().unwrap_or_default());
        }
        if is_kept {
            found.push(argument);
        }
    }
    found
}
