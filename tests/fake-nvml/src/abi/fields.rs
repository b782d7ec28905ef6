//! Field values: many values in one call, each with its own return code.

use std::ffi::c_int;
use std::ops::RangeInclusive;

use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlFieldValue_t, nvmlValue_t, nvmlValueType_enum_NVML_VALUE_TYPE_DOUBLE as DOUBLE,
    nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_INT as SIGNED_INT,
    nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_LONG_LONG as SIGNED_LONG_LONG,
    nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT as UNSIGNED_INT,
    nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG as UNSIGNED_LONG_LONG, nvmlValueType_t,
};
use serde_json::Number;

use super::{INVALID_ARGUMENT, NOT_SUPPORTED, NvmlResult, Out, SUCCESS, entry_points, now_us};
use crate::gpu::{Field, FieldKind};

/// Data and raw traffic over NVLinks, transmitted and received.
const OF_LINKS: RangeInclusive<u32> = 138..=141;
/// The scope of their sums over all links.
const ALL_LINKS: u32 = u32::MAX;

entry_points! {
    /// The traffic over NVLinks is that of all links, and no link has a value of its own. Other fields have no scope.
    fn nvmlDeviceGetFieldValues(call, device: nvmlDevice_t, count: c_int, values: Out<nvmlFieldValue_t>) {
        let gpu = call.gpu(device)?;
        let count = usize::try_from(count).map_err(|_| INVALID_ARGUMENT)?;
        for value in values.slice(count)? {
            let has_scope = !OF_LINKS.contains(&value.fieldId) || value.scopeId == ALL_LINKS;
            fill_value(value, gpu.fields.get(&value.fieldId).filter(|_| has_scope));
        }
        Ok(())
    }
}

fn fill_value(value: &mut nvmlFieldValue_t, field: Option<&Field>) {
    value.timestamp = now_us().cast_signed();
    value.latencyUsec = 0;
    match encode(field) {
        Ok((kind, bits)) => {
            value.valueType = kind;
            value.value = bits;
            value.nvmlReturn = SUCCESS;
        }
        Err(code) => value.nvmlReturn = code,
    }
}

fn encode(field: Option<&Field>) -> NvmlResult<(nvmlValueType_t, nvmlValue_t)> {
    let (number, kind) = match field {
        None => return Err(NOT_SUPPORTED),
        Some(Field::Error(fault)) => return Err(fault.error),
        Some(Field::Plain(number)) => (number, kind_of(number)),
        Some(Field::Typed(typed)) => (&typed.value, typed.kind),
    };
    let unsigned = number.as_u64().unwrap_or(0);
    let signed = number.as_i64().unwrap_or(0);
    // Members shorter than the union share its first bytes; the rest is zero.
    let mut bits = nvmlValue_t { ullVal: 0 };
    Ok(match kind {
        FieldKind::F64 => (DOUBLE, nvmlValue_t { dVal: number.as_f64().unwrap_or(0.0) }),
        FieldKind::U64 => (UNSIGNED_LONG_LONG, nvmlValue_t { ullVal: unsigned }),
        FieldKind::I64 => (SIGNED_LONG_LONG, nvmlValue_t { sllVal: signed }),
        FieldKind::U32 => {
            bits.uiVal = unsigned as u32;
            (UNSIGNED_INT, bits)
        }
        FieldKind::I32 => {
            bits.siVal = signed as i32;
            (SIGNED_INT, bits)
        }
    })
}

fn kind_of(number: &Number) -> FieldKind {
    if number.is_u64() {
        FieldKind::U64
    } else if number.is_i64() {
        FieldKind::I64
    } else {
        FieldKind::F64
    }
}
