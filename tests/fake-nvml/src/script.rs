//! Answers that change from call to call.
//!
//! A script names a symbol and lists steps for it. The nth call of that symbol for a GPU sees the GPU as the
//! nth step of that GPU describes it; the last step stays. A step is a patch on the GPU as the state file has
//! it, not on the step before, and other symbols never see it. So a test makes two readings race:
//! ```json
//! {"nvmlDeviceGetMemoryInfo_v2": [{"gpu": 0, "patch": {"memory": {"used": 1000}}},
//!                                 {"gpu": 0, "patch": {}}]}
//! ```
//! A call that only learns how long a list is (it answers *insufficient size*) does not use its step up, so
//! one step is one reading also where a caller asks twice. Replacing the state file starts every script anew.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::gpu::Gpu;
use crate::state::State;

/// One step of a script.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// Index of the GPU that this step is for.
    #[serde(default)]
    pub gpu: usize,
    /// Laid over the GPU: objects are merged, all else replaces. Unlike an RFC 7386 merge patch, null is
    /// stored as null, because here it means *this GPU cannot tell*.
    pub patch: Value,
}

impl Step {
    /// A step for one GPU, with the patch as `serde_json::json!` makes it.
    pub fn new(gpu: usize, patch: Value) -> Self {
        Self { gpu, patch }
    }
}

/// The GPUs that a script shows: by symbol, then by GPU, in the order of the calls.
pub(crate) type Scenes = BTreeMap<String, HashMap<usize, Vec<Arc<Gpu>>>>;

/// Lays every step over its GPU.
///
/// # Errors
/// The step that names no GPU of the state, or whose result is not a GPU.
pub(crate) fn expand(state: &State) -> Result<Scenes, String> {
    let mut scenes = Scenes::new();
    for (symbol, steps) in &state.script {
        let by_gpu = scenes.entry(symbol.clone()).or_default();
        for (number, step) in steps.iter().enumerate() {
            let fault = |what: String| format!("script of {symbol}, step {number}: {what}");
            let gpu =
                state.gpus.get(step.gpu).ok_or_else(|| fault(format!("there is no GPU {}", step.gpu)))?;
            let mut value = serde_json::to_value(gpu).map_err(|error| fault(error.to_string()))?;
            merge(&mut value, &step.patch);
            let gpu: Gpu = serde_json::from_value(value).map_err(|error| fault(error.to_string()))?;
            gpu.check().map_err(fault)?;
            by_gpu.entry(step.gpu).or_default().push(Arc::new(gpu));
        }
    }
    Ok(scenes)
}

fn merge(target: &mut Value, patch: &Value) {
    match (target, patch) {
        (Value::Object(target), Value::Object(patch)) => {
            for (key, value) in patch {
                merge(target.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (target, patch) => *target = patch.clone(),
    }
}
