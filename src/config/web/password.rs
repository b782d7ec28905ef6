//! Hashes of passwords in bcrypt's form: `$2y$COST$` and 53 characters of salt and hash.

/// Beyond this one check takes longer than a scrape may, and a stranger could keep a core busy with a few requests.
const MOST_COST: u32 = 16;

/// The hash of a password.
#[derive(Clone, PartialEq, Eq)]
pub struct PasswordHash {
    text: String,
    cost: u32,
}

impl PasswordHash {
    /// Reads one.
    ///
    /// # Errors
    /// What is wrong and what to do, without the text: it may be a password.
    pub fn parse(text: &str) -> Result<Self, String> {
        const MAKE: &str = "make one with `htpasswd -nBC 10 NAME`";
        let rest = ["$2a$", "$2b$", "$2x$", "$2y$"].iter().find_map(|version| text.strip_prefix(version));
        let Some((cost, salt_and_hash)) = rest.and_then(|rest| rest.split_once('$')) else {
            return Err(format!("wanted is bcrypt's form, $2y$10$...; {MAKE}"));
        };
        let of_form = |byte: u8| byte.is_ascii_alphanumeric() || b"./".contains(&byte);
        if salt_and_hash.len() != 53 || !salt_and_hash.bytes().all(of_form) {
            return Err(format!("after the cost stand 53 letters, digits, dots and slashes; {MAKE}"));
        }
        let number = cost.parse().ok().filter(|number| cost.len() == 2 && (4..=MOST_COST).contains(number));
        let cost =
            number.ok_or_else(|| format!("its cost is {cost}; wanted is 04 to {MOST_COST}; {MAKE}"))?;
        // else the check of this user would fail at once, and tell by its time that the name is known
        if text.parse::<bcrypt::HashParts>().is_err() {
            return Err(format!("a character of it was changed: bcrypt makes no such salt or hash; {MAKE}"));
        }
        Ok(Self { text: text.to_owned(), cost })
    }

    /// As it stands in the file.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The binary logarithm of the rounds.
    pub fn cost(&self) -> u32 {
        self.cost
    }
}

impl std::fmt::Debug for PasswordHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PasswordHash(cost {})", self.cost)
    }
}
