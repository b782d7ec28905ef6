//! Colors and characters that the terminal has.

use ratatui::style::{Color, Modifier, Style};

/// What the terminal can show. Only the sixteen colors that each has are used.
#[derive(Clone, Copy, Debug)]
pub struct Theme {
    /// Colors may be used.
    pub has_color: bool,
    /// Block characters may be used.
    pub has_blocks: bool,
}

/// Shares of a limit from which a bar changes its color.
const HIGH: f64 = 0.75;
const CRITICAL: f64 = 0.9;
/// Colors of the holders of a GPU, one after the other.
const HOLDERS: [Color; 6] =
    [Color::Green, Color::Blue, Color::Yellow, Color::Magenta, Color::Cyan, Color::White];
/// Heights of a sparkline.
const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const ASCII: [char; 8] = ['_', '.', ':', '-', '=', '+', '*', '#'];

impl Theme {
    /// Reads NO_COLOR, TERM and the locale.
    pub fn from_environment() -> Self {
        let of = |name: &str| std::env::var(name).unwrap_or_default();
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].map(of).into_iter().find(|value| !value.is_empty());
        let locale = locale.unwrap_or_default().to_lowercase();
        let terminal = of("TERM");
        let is_simple = matches!(terminal.as_str(), "" | "dumb" | "linux" | "vt100" | "vt220");
        Self {
            has_color: of("NO_COLOR").is_empty()
                && !matches!(terminal.as_str(), "" | "dumb" | "vt100" | "vt220"),
            has_blocks: !is_simple && (locale.contains("utf-8") || locale.contains("utf8")),
        }
    }

    fn color(self, color: Color) -> Style {
        if self.has_color { Style::new().fg(color) } else { Style::new() }
    }

    /// The style of a share of a limit.
    pub fn level(self, ratio: Option<f64>) -> Style {
        match ratio {
            Some(ratio) if ratio >= CRITICAL => self.color(Color::Red).add_modifier(Modifier::BOLD),
            Some(ratio) if ratio >= HIGH => self.color(Color::Yellow),
            Some(_) => self.color(Color::Green),
            None => Style::new(),
        }
    }

    /// The style of the holder with this number.
    pub fn holder(self, number: usize) -> Style {
        self.color(HOLDERS[number % HOLDERS.len()])
    }

    /// The style of what is wrong.
    pub fn alarm(self) -> Style {
        self.color(Color::Red).add_modifier(Modifier::BOLD)
    }

    /// The style of what is less important.
    pub fn dim(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    /// Returns the character of a full part of a bar; without colors, holders are told apart by letters.
    pub fn full(self, holder: Option<usize>) -> char {
        match holder {
            Some(number) if !self.has_color => char::from(b'a' + (number % 26) as u8),
            _ if self.has_blocks => '█',
            _ => '#',
        }
    }

    /// Returns the character of an empty part of a bar.
    pub fn empty(self) -> char {
        if self.has_blocks { '░' } else { '.' }
    }

    /// Returns the character of a point of a sparkline; a gap stays empty.
    pub fn spark(self, share: Option<f64>) -> char {
        let characters = if self.has_blocks { BLOCKS } else { ASCII };
        share.map_or(' ', |share| characters[((share * 7.0).round() as usize).min(7)])
    }
}
