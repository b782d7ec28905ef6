//! `memledger top`: who uses RAM and VRAM, live, who is next, and who was killed.
//!
//! Three threads send messages to the one that draws: keys, overviews, newest kills. None of them makes another wait: a driver or a service
//! that hangs leaves the keys working.

mod draw;
mod state;
#[cfg(test)]
mod tests;
mod theme;

use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use anyhow::bail;
use clap::{ArgMatches, Command};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEvent, KeyEventKind};

use super::event_source::TIMEOUT;
use super::overview_source::{OverviewSource, newest_kills};
use super::ps::{sort_flag, sort_of};
use crate::config::Config;
use crate::events::LedgerEvent;
use crate::overview::{Details, Overview};
use state::{KeyAction, ScreenState};
use theme::Theme;

/// Time between two overviews.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time between two looks at the ledger and at the host for kills.
const KILLS_INTERVAL: Duration = Duration::from_secs(10);
/// Longest answer of a command that is shown, in bytes.
const MAX_ANSWER: usize = 1 << 20;

/// Returns the verb with its own flags; the flags of the settings are added elsewhere.
pub fn command() -> Command {
    Command::new("top")
        .about("Watch which containers use RAM and VRAM, who runs out next, and who was killed.")
        .after_help(
            "Asks memledger serve; without one it samples this host itself. `?` lists the keys. For scripts: memledger ps --json.\n\
             Exit status: 0 when it is ended, 2 wrong use, 3 there is no terminal, or nothing can be sampled.",
        )
        .arg(sort_flag())
}

/// What the threads tell the one that draws.
enum ScreenEvent {
    Key(KeyEvent),
    Resized,
    Overview(Result<Overview, String>),
    Kills(Vec<LedgerEvent>),
    /// What a command answered: its title and text.
    Answer(String, String),
    /// A signal came, or the terminal is gone.
    Quit,
}

pub fn run(config: &Config, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        bail!(
            "top needs a terminal; `memledger ps` prints the same once (docker exec and kubectl exec need -it)"
        );
    }
    let source = Arc::new(OverviewSource::open(config, TIMEOUT)?);
    let (sender, messages) = mpsc::channel();
    let wanted = Arc::new(Wanted::default());
    watch_signals(sender.clone())?;
    spawn("overview", {
        let (source, wanted, sender) = (Arc::clone(&source), Arc::clone(&wanted), sender.clone());
        move || fetch_overviews(&source, &wanted, &sender)
    })?;
    spawn("kills", {
        let (sender, config) = (sender.clone(), config.clone());
        move || fetch_kills(&config, &sender)
    })?;
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let mut state = ScreenState::new(host, source.is_served(), sort_of(matches), Theme::from_environment());
    let mut terminal = ratatui::try_init()?; // its hook restores the terminal before a panic is printed
    spawn("keys", {
        let sender = sender.clone();
        move || read_keys(&sender)
    })?;
    let ended = follow(&mut terminal, &mut state, &messages, &sender, &wanted);
    ratatui::restore();
    ended.map(|()| ExitCode::SUCCESS)
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    std::thread::Builder::new().name(name.to_owned()).spawn(body).map(drop)
}

/// Draws after each message, until the end.
fn follow(
    terminal: &mut DefaultTerminal,
    state: &mut ScreenState,
    messages: &Receiver<ScreenEvent>,
    sender: &Sender<ScreenEvent>,
    wanted: &Wanted,
) -> anyhow::Result<()> {
    loop {
        if terminal.draw(|frame| draw::draw(frame, state)).is_err() {
            return Ok(()); // the terminal is gone
        }
        let Ok(first) = messages.recv() else { return Ok(()) };
        // what came meanwhile is drawn at once
        for message in std::iter::once(first).chain(messages.try_iter()) {
            let action = match message {
                ScreenEvent::Key(key) => state.press(key),
                ScreenEvent::Resized => KeyAction::None,
                ScreenEvent::Overview(overview) => state.set_overview(overview),
                ScreenEvent::Kills(kills) => state.set_kills(kills),
                ScreenEvent::Answer(title, text) => state.show_text(title, &text),
                ScreenEvent::Quit => KeyAction::Quit,
            };
            match action {
                KeyAction::None => {}
                KeyAction::Quit => return Ok(()),
                KeyAction::Ask(verb, name) => ask(verb, name, sender.clone())?,
            }
        }
        wanted.set(state.container().map(str::to_owned));
    }
}

/// The container whose details the screen shows.
#[derive(Default)]
struct Wanted {
    id: Mutex<Option<String>>,
    changed: Condvar,
}

impl Wanted {
    fn set(&self, id: Option<String>) {
        let mut wanted = self.id.lock().unwrap_or_else(PoisonError::into_inner);
        if *wanted != id {
            *wanted = id;
            self.changed.notify_all();
        }
    }

    fn get(&self) -> Option<String> {
        self.id.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until another container is wanted, or this time has passed.
    fn wait(&self, last: &Option<String>, timeout: Duration) {
        let wanted = self.id.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_timeout_while(wanted, timeout, |wanted| wanted == last));
    }
}

fn fetch_overviews(source: &OverviewSource, wanted: &Wanted, sender: &Sender<ScreenEvent>) {
    if let OverviewSource::Own(sampler) = source
        && let Err(error) = sampler.wait_for_rates()
    {
        let _ = sender.send(ScreenEvent::Overview(Err(format!("{error:#}"))));
    }
    loop {
        let id = wanted.get();
        let details = id.as_deref().map_or(Details::None, Details::Of);
        let overview = source.overview(details, TIMEOUT).map_err(|error| format!("{error:#}"));
        if sender.send(ScreenEvent::Overview(overview)).is_err() {
            return;
        }
        wanted.wait(&id, INTERVAL);
    }
}

fn fetch_kills(config: &Config, sender: &Sender<ScreenEvent>) {
    while sender.send(ScreenEvent::Kills(newest_kills(config).0)).is_ok() {
        std::thread::sleep(KILLS_INTERVAL);
    }
}

fn read_keys(sender: &Sender<ScreenEvent>) {
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
fn watch_signals(sender: Sender<ScreenEvent>) -> anyhow::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let guard = runtime.enter();
    let kinds = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup(), SignalKind::quit()];
    let signals: Vec<_> = kinds.into_iter().map(signal).collect::<Result<_, _>>()?;
    drop(guard);
    spawn("signals", move || {
        runtime.block_on(async move {
            let waiting = signals.into_iter().map(|mut signal| Box::pin(async move { signal.recv().await }));
            futures_util::future::select_all(waiting).await;
        });
        let _ = sender.send(ScreenEvent::Quit);
    })?;
    Ok(())
}

/// Runs another command of memledger, and sends its answer. It finds the same settings: those of the command line go with it.
fn ask(verb: &'static str, name: Option<String>, sender: Sender<ScreenEvent>) -> std::io::Result<()> {
    let words = std::iter::once(verb).chain(name.as_deref());
    let title = words.fold("memledger".to_owned(), |title, word| format!("{title} {word}"));
    spawn("answer", move || {
        let run = || {
            let mut command = std::process::Command::new(std::env::current_exe()?);
            command.arg(verb).args(shared_settings(std::env::args().skip(2)));
            command.arg("--").args(&name).stdin(std::process::Stdio::null()).output()
        };
        let text = match run() {
            Ok(output) => {
                let all = [output.stdout, output.stderr].concat();
                String::from_utf8_lossy(&all[..all.len().min(MAX_ANSWER)]).into_owned()
            }
            Err(error) => format!("memledger could not be started: {error}"),
        };
        let _ = sender.send(ScreenEvent::Answer(title, text));
    })
}

/// Returns those settings of a command line that say where the service and its ledger are, which every command knows.
fn shared_settings(arguments: impl Iterator<Item = String>) -> Vec<String> {
    const SHARED: [&str; 3] = ["--config.file", "--local.socket", "--state.path"];
    let mut found = Vec::new();
    let mut takes_next = false;
    for argument in arguments {
        let (name, has_value) = match argument.split_once('=') {
            Some((name, _)) => (name, true),
            None => (argument.as_str(), false),
        };
        let is_shared = SHARED.contains(&name);
        if takes_next || is_shared {
            takes_next = is_shared && !has_value && !takes_next;
            found.push(argument);
        }
    }
    found
}
