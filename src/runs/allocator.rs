//! The configuration of PyTorch's allocator among the settings of a run.

/// Names of the setting, by which one counts where both are set. PyTorch knows the second one from 2.9 on; 2.15 ignores it beside the
/// first, also if that is empty.
const NAMES: [&str; 2] = ["pytorch_cuda_alloc_conf", "pytorch_alloc_conf"];

/// Returns the name and the value that count.
fn effective<'a>(setting: impl Fn(&str) -> Option<&'a str>) -> Option<(&'static str, &'a str)> {
    NAMES.into_iter().find_map(|name| Some((name, setting(name)?)))
}

/// Returns whether the allocator may join free pieces of its cache; `setting` returns the value of a name.
pub fn has_expandable_segments<'a>(setting: impl Fn(&str) -> Option<&'a str>) -> bool {
    effective(setting).is_some_and(|(_, value)| value.contains("expandable_segments:True"))
}

/// Returns the variable that has the configuration of a run, or both names if it has none.
pub fn variable<'a>(setting: impl Fn(&str) -> Option<&'a str>) -> &'static str {
    match effective(setting) {
        Some(("pytorch_cuda_alloc_conf", _)) => "PYTORCH_CUDA_ALLOC_CONF",
        Some(_) => "PYTORCH_ALLOC_CONF",
        None => "PYTORCH_ALLOC_CONF (before PyTorch 2.9 PYTORCH_CUDA_ALLOC_CONF)",
    }
}

/// Returns the assignment that lets the allocator join free pieces, beside what is set already.
pub fn with_expandable_segments<'a>(setting: impl Fn(&str) -> Option<&'a str>) -> String {
    const ADDED: &str = "expandable_segments:True";
    let Some((name, value)) = effective(setting) else {
        return format!("PYTORCH_ALLOC_CONF={ADDED} (before PyTorch 2.9 PYTORCH_CUDA_ALLOC_CONF)");
    };
    let others =
        value.split(',').filter(|option| !option.is_empty() && !option.starts_with("expandable_segments"));
    format!("{}={}", name.to_uppercase(), others.chain([ADDED]).collect::<Vec<_>>().join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_name_has_the_configuration() {
        let segments = "max_split_size_mb:64,expandable_segments:True";
        for (settings, is_set, name) in [
            (vec![], false, "PYTORCH_ALLOC_CONF (before PyTorch 2.9 PYTORCH_CUDA_ALLOC_CONF)"),
            (vec![("pytorch_alloc_conf", segments)], true, "PYTORCH_ALLOC_CONF"),
            (vec![("pytorch_cuda_alloc_conf", segments)], true, "PYTORCH_CUDA_ALLOC_CONF"),
            (vec![("pytorch_cuda_alloc_conf", "backend:native")], false, "PYTORCH_CUDA_ALLOC_CONF"),
            (
                vec![("pytorch_alloc_conf", segments), ("pytorch_cuda_alloc_conf", "max_split_size_mb:64")],
                false,
                "PYTORCH_CUDA_ALLOC_CONF",
            ),
            (
                vec![("pytorch_alloc_conf", segments), ("pytorch_cuda_alloc_conf", "")],
                false,
                "PYTORCH_CUDA_ALLOC_CONF",
            ),
            (
                vec![("batch_size", segments)],
                false,
                "PYTORCH_ALLOC_CONF (before PyTorch 2.9 PYTORCH_CUDA_ALLOC_CONF)",
            ),
        ] {
            let setting =
                |wanted: &str| settings.iter().find(|(name, _)| *name == wanted).map(|(_, value)| *value);
            assert_eq!((has_expandable_segments(setting), variable(setting)), (is_set, name), "{settings:?}");
        }
    }
}
