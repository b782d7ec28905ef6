//! Adds to the error of an invalid command line the command that was probably meant.

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, Error};

use crate::config::meant;
use crate::text::{shell_quoted, similar};

/// What other tools call a verb, and the verb.
const OTHER_VERBS: &[(&str, &str)] = &[
    ("status", "ps"),
    ("list", "ps"),
    ("ls", "ps"),
    ("containers", "ps"),
    ("watch", "top"),
    ("stats", "top"),
    ("monitor", "top"),
    ("explain", "why"),
    ("inspect", "why"),
    ("oom", "events"),
    ("kills", "events"),
    ("exits", "events"),
    ("history", "runs"),
    ("show", "report"),
    ("diff", "compare"),
    ("recommend", "advise"),
    ("advice", "advise"),
    ("suggest", "advise"),
    ("start", "serve"),
    ("daemon", "serve"),
    ("exporter", "serve"),
    ("check", "doctor"),
    ("diagnose", "doctor"),
    ("info", "doctor"),
    ("health", "healthcheck"),
    ("ping", "healthcheck"),
    ("settings", "config show"),
    ("validate", "config check"),
    ("version", "-V"),
];

/// Replaces the suggestions of an error about an unknown verb or flag. `arguments` are those after the program's name.
pub fn with_suggestions(mut error: Error, mut command: Command, arguments: &[String]) -> Error {
    command.build(); // its verbs then know their whole name, for the usage
    let command = &command;
    let unknown = |error: &Error, kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        _ => String::new(),
    };
    // the verb, and the verb below it
    let mut verbs = vec![];
    let mut verb = command;
    for argument in arguments {
        let Some(below) = verb.find_subcommand(argument) else { break };
        verb = below;
        verbs.push(verb.get_name());
    }
    let tips = match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let word = unknown(&error, ContextKind::InvalidSubcommand);
            match verbs.as_slice() {
                [] => verbs_for(command, &word, arguments),
                ["config"] => config_for(verb, &word, arguments),
                _ => return error,
            }
        }
        ErrorKind::UnknownArgument => {
            let flag = unknown(&error, ContextKind::InvalidArg);
            if !flag.starts_with('-') {
                return error;
            }
            if verbs.is_empty() {
                without_verb(command, &flag, arguments)
            } else {
                error.remove(ContextKind::SuggestedSubcommand);
                if verbs[0] != "run" {
                    error.remove(ContextKind::Suggested); // no container's name begins with a dash
                }
                suggest_flags(&mut error, verb, &flag);
                // the usage names the flag that clap took it for
                let usage = verb.clone().render_usage();
                error.insert(ContextKind::Usage, ContextValue::StyledStr(usage));
                return error;
            }
        }
        _ => return error,
    };
    error.remove(ContextKind::SuggestedSubcommand);
    error.remove(ContextKind::SuggestedArg);
    error.remove(ContextKind::Suggested);
    let tips: Vec<StyledStr> = tips.into_iter().map(StyledStr::from).collect();
    if !tips.is_empty() {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
    }
    error
}

/// Returns the commands that an unknown verb may stand for: a verb, or `why` with the name of a container.
fn verbs_for(command: &Command, word: &str, arguments: &[String]) -> Vec<String> {
    let others: Vec<&str> =
        arguments.iter().map(String::as_str).skip_while(|it| *it != word).skip(1).collect();
    let line = |verb: &str, rest: &[&str]| {
        let words = std::iter::once(verb).chain(rest.iter().copied());
        format!("memledger {}", words.map(shell_quoted).collect::<Vec<_>>().join(" "))
    };
    if word == "log" || word == "logs" {
        let name: Vec<&str> = others.iter().copied().filter(|it| !it.starts_with('-')).take(1).collect();
        return vec![line("why", &[&name[..], &["--logs"]].concat())];
    }
    if let Some((_, verb)) = OTHER_VERBS.iter().find(|(name, _)| word.eq_ignore_ascii_case(name)) {
        // the options of another tool are not those of the verb
        let takes_names = matches!(*verb, "why" | "report" | "compare" | "advise" | "config check");
        let names = others.iter().filter(|it| takes_names && !it.starts_with('-')).map(|it| shell_quoted(it));
        return vec![
            ["memledger".to_owned(), (*verb).to_owned()]
                .into_iter()
                .chain(names)
                .collect::<Vec<_>>()
                .join(" "),
        ];
    }
    let verbs: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
    let mut lines: Vec<_> = similar(verbs, word).into_iter().map(|verb| line(verb, &others)).collect();
    let of_container: Vec<&str> = std::iter::once(word).chain(others.iter().copied()).collect();
    let why = line("why", &of_container);
    lines.push(if lines.is_empty() { why } else { format!("{why} (if it is a container)") });
    lines
}

/// Returns the commands that an unknown word after `config` stands for: one of its verbs, or a file to check.
fn config_for(config: &Command, word: &str, arguments: &[String]) -> Vec<String> {
    let verbs: Vec<&str> = config.get_subcommands().map(Command::get_name).collect();
    let verb = match word {
        "validate" | "test" | "verify" | "lint" => vec!["check"],
        "print" | "dump" | "list" | "get" => vec!["show"],
        _ => similar(verbs, word),
    };
    let rest: Vec<String> = arguments
        .iter()
        .skip_while(|it| *it != word)
        .skip(1)
        .map(|it| format!(" {}", shell_quoted(it)))
        .collect();
    match verb.as_slice() {
        [] => vec![format!("memledger config check {}", shell_quoted(word))],
        verbs => verbs.iter().map(|verb| format!("memledger config {verb}{}", rest.concat())).collect(),
    }
}

/// Returns the command that a flag without a verb stands for.
fn without_verb(command: &Command, flag: &str, arguments: &[String]) -> Vec<String> {
    if flag == "-v" {
        return vec!["memledger -V".to_owned()];
    }
    let Some(serve) = command.find_subcommand("serve") else { return vec![] };
    let is_flag = |wanted: &str| flags(serve).iter().any(|known| known == wanted);
    let name = name_of(flag);
    if is_flag(name) {
        let words: Vec<_> = arguments.iter().map(|word| shell_quoted(word)).collect();
        return vec![format!("memledger serve {}", words.join(" "))];
    }
    flags_for(serve, flag).iter().map(|flag| format!("memledger serve {flag}")).collect()
}

/// Replaces the flags that the error suggests.
fn suggest_flags(error: &mut Error, verb: &Command, flag: &str) {
    error.remove(ContextKind::SuggestedArg);
    let likely = flags_for(verb, flag);
    if !likely.is_empty() {
        error.insert(ContextKind::SuggestedArg, ContextValue::Strings(likely));
    }
}

/// Returns the flags of a verb that an unknown one may stand for.
fn flags_for(verb: &Command, flag: &str) -> Vec<String> {
    let known = flags(verb);
    let known: Vec<&str> = known.iter().map(String::as_str).collect();
    meant(&known, name_of(flag)).into_iter().map(|name| format!("--{name}")).collect()
}

/// Returns the name of a flag without dashes and value.
fn name_of(flag: &str) -> &str {
    let flag = flag.trim_start_matches('-');
    flag.split_once('=').map_or(flag, |(name, _)| name)
}

/// Returns the long names of the flags of a verb.
fn flags(verb: &Command) -> Vec<String> {
    let names = |arg: &clap::Arg| {
        let long = arg.get_long().filter(|long| !long.starts_with('[')).map(str::to_owned);
        let aliases = arg.get_all_aliases().unwrap_or_default();
        long.into_iter().chain(aliases.into_iter().map(str::to_owned)).collect::<Vec<_>>()
    };
    verb.get_arguments().flat_map(names).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::FlagForm;

    /// Returns the tips of the error of a command line.
    fn tips(line: &str) -> Vec<String> {
        let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let command = || super::super::command(FlagForm::Help);
        let words = std::iter::once("memledger").chain(arguments.iter().map(String::as_str));
        let error = command().try_get_matches_from(words).expect_err(line);
        let text = with_suggestions(error, command(), &arguments).to_string();
        assert!(!text.contains("--report.dir"), "nobody meant it: {text}");
        let verb = arguments.first().filter(|verb| command().find_subcommand(verb).is_some());
        assert!(
            text.contains(&format!("Usage: memledger {}", verb.map_or("<COMMAND>", String::as_str))),
            "{text}"
        );
        text.lines().filter_map(|line| line.trim().strip_prefix("tip: ")).map(str::to_owned).collect()
    }

    #[test]
    fn unknown_verb_names_the_command_that_is_meant() {
        for (line, meant) in [
            ("my-train", "memledger why my-train"),
            ("my-train --logs --json", "memledger why my-train --logs --json"),
            ("status", "memledger ps"),
            ("list", "memledger ps"),
            ("ls -a", "memledger ps"),
            ("logs my-train", "memledger why my-train --logs"),
            ("logs -f my-train", "memledger why my-train --logs"),
            ("logs", "memledger why --logs"),
            ("inspect my-train", "memledger why my-train"),
            ("version", "memledger -V"),
            ("-v", "memledger -V"),
            ("config chek a.yml", "memledger config check a.yml"),
            ("config a.yml", "memledger config check a.yml"),
            ("config validate", "memledger config check"),
            ("--web.listen-address=:9000", "memledger serve --web.listen-address=:9000"),
            ("--port 9000", "memledger serve --web.listen-address"),
        ] {
            assert_eq!(tips(line), [meant], "{line}");
        }
    }

    #[test]
    fn misspelled_verb_may_be_a_container_too() {
        for (line, meant) in [
            ("evnts --since=1h", "memledger events --since=1h"),
            ("dotcor", "memledger doctor"),
            ("compair a b", "memledger compare a b"),
            ("pss", "memledger ps"),
            ("sever", "memledger serve"),
            ("release_gpu", "memledger release-gpu"),
        ] {
            assert_eq!(
                tips(line),
                [meant.to_owned(), format!("memledger why {line} (if it is a container)")]
            );
        }
    }

    #[test]
    fn unknown_flag_names_one_that_helps_or_none() {
        let similar = |flag| format!("a similar argument exists: '{flag}'");
        for (line, flag) in [
            ("serve --port 9000", "--web.listen-address"),
            ("serve --listen=:9000", "--web.listen-address"),
            ("serve --web.lisen-address=:9000", "--web.listen-address"),
            ("serve --config /a.yml", "--config.file"),
            ("serve --config-file /a.yml", "--config.file"),
            ("serve --interval 5s", "--sample.interval"),
            ("serve --log-level debug", "--log.level"),
            ("serve --loglevel debug", "--log.level"),
            ("serve --no-colector.gpu", "--no-collector.gpu"),
            ("ps --config=/a.yml", "--config.file"),
            ("events --sinc=1h", "--since"),
            ("why --kernel_log=f x", "--kernel-log"),
        ] {
            assert_eq!(tips(line), [similar(flag)], "{line}");
        }
        for line in
            ["why --port=1 x", "ps --quux", "serve --quux=1", "serve -p 9000", "why -x y", "events --follow"]
        {
            assert_eq!(tips(line), [""; 0], "{line}");
        }
        assert!(tips("run --memry 3G -- true")[0].contains("--memory"));
    }
}
