//! Lines that the kernel prints in fragments, because a path makes them long. What marks a fragment differs: a flag in /dev/kmsg, a
//! level in syslog(2), nothing in a text.

use super::Line;
use crate::parse::find;

/// `Memory cgroup stats for PATH:`, before 5.3 with the counters behind it.
const STATS: &[u8] = b"Memory cgroup stats for ";

/// Maximum number of fragments that are joined.
pub(super) const MAX_FRAGMENTS: usize = 16;

/// Returns whether the kernel prints this line in fragments: those with a path.
pub(super) fn may_have_fragments(text: &[u8]) -> bool {
    [&b"oom-kill:"[..], b"Task in ", b"Tasks in ", STATS].iter().any(|head| text.starts_with(head))
}

/// Returns whether the rest of this line is in the next ones.
pub(super) fn is_unfinished(text: &[u8]) -> bool {
    may_have_fragments(text) && !is_complete(text)
}

/// Returns whether a text with the beginning of such a line is the whole of it.
pub(super) fn is_complete(text: &[u8]) -> bool {
    match text.strip_prefix(STATS) {
        // `unevictable` is the last counter
        Some(rest) => {
            rest.ends_with(b":") || find(rest, b" unevictable:").is_some_and(|_| rest.ends_with(b"KB"))
        }
        None => Line::of(text).is_some(),
    }
}

/// Returns whether a text may continue an unfinished line, where nothing marks a continuation.
pub(super) fn may_continue(unfinished: &[u8], text: &[u8]) -> bool {
    if !unfinished.starts_with(STATS) {
        return Line::of(text).is_none();
    }
    let is_counter = |word: &[u8]| {
        let colon = find(word, b":").filter(|colon| *colon > 0);
        let value = colon.and_then(|colon| word[colon + 1..].strip_suffix(b"KB"));
        value.is_some_and(|value| !value.is_empty() && value.iter().all(u8::is_ascii_digit))
    };
    let counters = text.strip_prefix(b":").unwrap_or(text).trim_ascii();
    let is_path = unfinished == STATS && text.starts_with(b"/");
    is_path || counters.split(|&byte| byte == b' ').all(is_counter) || text == b":"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stats_line_is_complete_with_its_last_counter() {
        let head = b"Memory cgroup stats for /docker/a";
        let old = [&head[..], b": cache:0KB rss:4KB"].concat();
        assert!(is_unfinished(head) && is_unfinished(&old));
        assert!(is_complete(&[&head[..], b":"].concat()));
        assert!(is_complete(&[&old[..], b" active_file:0KB unevictable:0KB"].concat()));
        for (text, may) in [
            (&b": cache:0KB rss:65024KB"[..], true),
            (b" mapped_file:0KB dirty:0KB", true),
            (b":", true),
            (b"[ pid ]   uid  tgid total_vm      rss", false),
            (b"anon 66695168", false),
            (b"eth0: link up", false),
            (b"", false),
        ] {
            assert_eq!(may_continue(head, text), may, "{}", String::from_utf8_lossy(text));
        }
        assert!(may_continue(STATS, b"/docker/a"), "a long path is a fragment of its own");
    }
}
