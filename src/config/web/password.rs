//! Password hashes in the format of bcrypt: `$2y$COST$` and 53 characters of salt and hash.

/// Beyond this cost, one check takes longer than the timeout of a scrape, and a few requests could keep a core busy.
const MAX_COST: u32 = 16;

/// The hash of a password.
#[derive(Clone, PartialEq, Eq)]
pub struct PasswordHash {
    text: String,
    cost: u32,
}

impl PasswordHash {
    /// Parses a hash.
    ///
    /// # Errors
    /// The problem and the fix, without the text, which may be a password.
    pub fn parse(text: &str) -> Result<Self, String> {
        const MAKE: &str = "make one with `htpasswd -nBC 10 NAME`";
        let rest = ["$2a$", "$2b$", "$2x$", "$2y$"].iter().find_map(|version| text.strip_prefix(version));
        let Some((cost, salt_and_hash)) = rest.and_then(|rest| rest.split_once('$')) else {
            return Err(format!("expected the format of bcrypt, $2y$10$...; {MAKE}"));
        };
        let of_form = |byte: u8| byte.is_ascii_alphanumeric() || b"./".contains(&byte);
        if salt_and_hash.len() != 53 || !salt_and_hash.bytes().all(of_form) {
            return Err(format!("expected 53 letters, digits, dots and slashes after the cost; {MAKE}"));
        }
        let number = cost.parse().ok().filter(|number| cost.len() == 2 && (4..=MAX_COST).contains(number));
        let cost = number.ok_or_else(|| format!("its cost is {cost}; expected 04 to {MAX_COST}; {MAKE}"))?;
        // otherwise the check of this user would fail immediately, and its duration would reveal that the name exists
        if text.parse::<bcrypt::HashParts>().is_err() {
            return Err(format!(
                "a character of it was changed: bcrypt does not produce such a salt or hash; {MAKE}"
            ));
        }
        Ok(Self { text: text.to_owned(), cost })
    }

    /// Returns the text as in the file.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns the binary logarithm of the number of rounds.
    pub fn cost(&self) -> u32 {
        self.cost
    }
}

impl std::fmt::Debug for PasswordHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PasswordHash(cost {})", self.cost)
    }
}
