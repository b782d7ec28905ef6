//! Values that change from call to call.
//!
//! A script lists steps for a symbol. The nth call of that symbol for a GPU uses the nth step of that GPU; the last step
//! stays. A step is a patch on the GPU of the state file, not on the previous step, and does not affect other symbols.
//! So a test makes two readings race:
//! ```json
//! {"nvmlDeviceGetMemoryInfo_v2": [{"gpu": 0, "patch": {"memory": {"used": 1000}}},
//!                                 {"gpu": 0, "patch": {}}]}
//! ```
//! A call that only reads the length of a list (it returns *insufficient size*) uses no step, so one step is one reading
//! even if a caller calls twice. Replacing the state file restarts every script.

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
    /// The index of its GPU.
    #[serde(default)]
    pub gpu: usize,
    /// The patch: objects are merged, all other values replaced. Unlike in an RFC 7386 merge patch, null is stored as
    /// null, because here it means *not supported*.
    pub patch: Value,
}

impl Step {
    /// Returns a step for one GPU, with a patch from `serde_json::json!`.
    pub fn new(gpu: usize, patch: Value) -> Self {
        Self { gpu, patch }
    }
}

/// The patched GPUs of a script: by symbol, then by GPU, in the order of the calls.
pub(crate) type Scenes = BTreeMap<String, HashMap<usize, Vec<Arc<Gpu>>>>;

/// Applies every step to its GPU.
///
/// # Errors
/// A step without a GPU in the state, or whose result is not a GPU.
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
