//! What the screens show, and what keys change.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::theme::Theme;
use crate::cli::overview_source::NewestKills;
use crate::overview::{ContainerUse, Overview, Sort};

/// Lines that a page key moves.
const PAGE: usize = 10;

/// What is to be done after a message.
#[derive(Debug, PartialEq, Eq)]
pub enum KeyAction {
    /// Nothing.
    None,
    /// End.
    Quit,
    /// Run this command for the container with this name and id; `why` also without one.
    RunCommand(&'static str, Option<(String, String)>),
}

/// The screen in front.
#[derive(Debug, PartialEq, Eq)]
pub enum Screen {
    /// All containers.
    List,
    /// One container, by its id, with its processes from one on.
    Container { id: String, from: usize },
    /// An answer of a command, from a line on.
    Text { title: String, lines: Vec<String>, from: usize },
    /// The keys.
    Help,
}

/// All that is drawn.
pub struct ScreenState {
    /// Name of the host.
    pub host: String,
    /// A service answers.
    pub is_served: bool,
    /// The newest overview.
    pub overview: Option<Overview>,
    /// Why there is no newer one.
    pub error: Option<String>,
    /// The newest kills; `None` until they were read.
    pub kills: Option<NewestKills>,
    /// The order of containers.
    pub sort: Sort,
    /// Containers whose names contain it.
    pub filter: String,
    /// Keys go to the filter.
    pub is_filtering: bool,
    /// Id of the container that keys mean.
    pub selected: Option<String>,
    /// Screens above the list, the one in front last.
    screens: Vec<Screen>,
    /// The output of a command is not there yet.
    is_running_command: bool,
    /// What the terminal can show.
    pub theme: Theme,
}

impl ScreenState {
    /// Begins with the list.
    pub fn new(host: String, is_served: bool, sort: Sort, theme: Theme) -> Self {
        Self {
            host,
            is_served,
            overview: None,
            error: None,
            kills: None,
            sort,
            filter: String::new(),
            is_filtering: false,
            selected: None,
            screens: vec![],
            is_running_command: false,
            theme,
        }
    }

    /// Returns the screen in front.
    pub fn screen(&self) -> &Screen {
        self.screens.last().unwrap_or(&Screen::List)
    }

    /// Returns the id of the container whose details are shown, also behind another screen.
    pub fn container(&self) -> Option<&str> {
        self.screens.iter().rev().find_map(|screen| match screen {
            Screen::Container { id, .. } => Some(id.as_str()),
            _ => None,
        })
    }

    /// Takes a new overview, or why there is none.
    pub fn set_overview(&mut self, overview: Result<Overview, String>) {
        match overview {
            Ok(mut overview) => {
                let sort = self.sort;
                overview.containers.sort_by(|one, other| sort.compare(one, other));
                (self.overview, self.error) = (Some(overview), None);
            }
            Err(error) => self.error = Some(error),
        }
    }

    /// Shows the output of a command that was started, if its screen is still there.
    pub fn set_output(&mut self, title: &str, output: &str) {
        self.is_running_command = false;
        for screen in &mut self.screens {
            if let Screen::Text { title: of, lines, .. } = screen
                && of == title
            {
                *lines = output.lines().map(|line| line.replace('\t', "    ")).collect();
            }
        }
    }

    /// Begins to wait for the output of a command; one at a time.
    fn run_command(&mut self, verb: &'static str, container: Option<(String, String)>) -> KeyAction {
        if self.is_running_command {
            return KeyAction::None;
        }
        self.is_running_command = true;
        let title = title(verb, container.as_ref().map(|(name, _)| name.as_str()));
        self.screens.push(Screen::Text { title, lines: vec!["...".to_owned()], from: 0 });
        KeyAction::RunCommand(verb, container)
    }

    /// Returns the containers that the filter leaves.
    pub fn containers(&self) -> Vec<&ContainerUse> {
        let all = self.overview.iter().flat_map(|overview| &overview.containers);
        all.filter(|container| container.name.to_lowercase().contains(&self.filter.to_lowercase())).collect()
    }

    /// Returns a container by its id, if it still runs.
    pub fn container_of(&self, id: &str) -> Option<&ContainerUse> {
        self.overview.as_ref()?.containers.iter().find(|container| container.id == id)
    }

    /// Returns the number of the selected row; the first one without a selection.
    pub fn selected_row(&self, shown: &[&ContainerUse]) -> usize {
        let selected = self.selected.as_deref();
        shown.iter().position(|container| Some(container.id.as_str()) == selected).unwrap_or(0)
    }

    /// Takes a key.
    pub fn press(&mut self, key: KeyEvent) -> KeyAction {
        if key.modifiers.contains(KeyModifiers::CONTROL) && matches!(key.code, KeyCode::Char('c' | 'd')) {
            return KeyAction::Quit;
        }
        if self.is_filtering {
            return self.edit_filter(key.code);
        }
        let processes =
            self.container().and_then(|id| Some(self.container_of(id)?.processes.as_ref()?.len()));
        let last_process = processes.unwrap_or(0).saturating_sub(1);
        let Some(front) = self.screens.last_mut() else { return self.press_in_list(key.code) };
        let (from, last) = match front {
            Screen::Text { lines, from, .. } => (Some(from), lines.len().saturating_sub(1)),
            Screen::Container { from, .. } => (Some(from), last_process),
            _ => (None, 0),
        };
        if let Some(from) = from
            && let Some(line) = moved(*from, last, key.code)
        {
            *from = line;
            return KeyAction::None;
        }
        let is_text = matches!(front, Screen::Text { .. });
        match key.code {
            KeyCode::Esc | KeyCode::Char('q' | 'h') | KeyCode::Left | KeyCode::Backspace | KeyCode::Enter => {
                self.screens.pop();
            }
            KeyCode::Char('?') if !is_text => self.screens.push(Screen::Help),
            KeyCode::Char(key) if !is_text => return self.press_command(key),
            _ => {}
        }
        KeyAction::None
    }

    fn press_in_list(&mut self, code: KeyCode) -> KeyAction {
        let shown: Vec<String> = self.containers().iter().map(|container| container.id.clone()).collect();
        let row = self.selected_row(&self.containers());
        if let Some(row) = moved(row, shown.len().saturating_sub(1), code) {
            self.selected = shown.get(row).cloned();
            return KeyAction::None;
        }
        match code {
            KeyCode::Char('q') => return KeyAction::Quit,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('/') => self.is_filtering = true,
            KeyCode::Char('?') => self.screens.push(Screen::Help),
            KeyCode::Char('s') => self.sort_by_next(),
            KeyCode::Enter | KeyCode::Right | KeyCode::Char('l') => {
                if let Some(id) = shown.get(row) {
                    self.selected = Some(id.clone());
                    self.screens.push(Screen::Container { id: id.clone(), from: 0 });
                }
            }
            KeyCode::Char(key) => return self.press_command(key),
            _ => {}
        }
        KeyAction::None
    }

    fn edit_filter(&mut self, code: KeyCode) -> KeyAction {
        match code {
            KeyCode::Esc => {
                self.filter.clear();
                self.is_filtering = false;
            }
            KeyCode::Enter => self.is_filtering = false,
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(key) => self.filter.push(key),
            _ => {}
        }
        KeyAction::None
    }

    fn sort_by_next(&mut self) {
        let at = Sort::ALL.iter().position(|(_, sort)| *sort == self.sort).unwrap_or(0);
        self.sort = Sort::ALL[(at + 1) % Sort::ALL.len()].1;
        if let Some(overview) = self.overview.take() {
            self.set_overview(Ok(overview));
        }
    }

    /// Returns the word of the order of containers.
    pub fn sort_word(&self) -> &'static str {
        Sort::ALL.iter().find(|(_, sort)| *sort == self.sort).map_or("", |(word, _)| word)
    }

    /// Starts the command of a key, of the container in front or the selected one.
    fn press_command(&mut self, key: char) -> KeyAction {
        let verb = match key {
            'W' => return self.run_command("why", None),
            'w' => "why",
            'r' => "runs",
            'a' => "advise",
            _ => return KeyAction::None,
        };
        let shown = self.containers();
        let selected = shown.get(self.selected_row(&shown)).map(|container| container.id.clone());
        let id = self.container().map(str::to_owned).or(selected);
        match id.and_then(|id| Some((self.container_of(&id)?.name.clone(), id))) {
            Some(container) => self.run_command(verb, Some(container)),
            None => KeyAction::None,
        }
    }
}

/// Returns the title of the output of a command.
pub fn title(verb: &str, name: Option<&str>) -> String {
    name.map_or_else(|| format!("memledger {verb}"), |name| format!("memledger {verb} {name}"))
}

/// Returns where a key moves to from a line.
fn moved(from: usize, last: usize, code: KeyCode) -> Option<usize> {
    let to = match code {
        KeyCode::Down | KeyCode::Char('j') => from + 1,
        KeyCode::Up | KeyCode::Char('k') => from.saturating_sub(1),
        KeyCode::PageDown | KeyCode::Char(' ') => from + PAGE,
        KeyCode::PageUp => from.saturating_sub(PAGE),
        KeyCode::Home | KeyCode::Char('g') => 0,
        KeyCode::End | KeyCode::Char('G') => last,
        _ => return None,
    };
    Some(to.min(last))
}
