//! Lists of floats and words as bytes, for states that are stored and handed over.

/// Appends the number of values, then the values.
pub(super) fn put(out: &mut Vec<u8>, values: &[f32]) {
    out.extend_from_slice(&(values.len() as u64).to_le_bytes());
    out.reserve(size_of_val(values));
    for value in values {
        out.extend_from_slice(&value.to_le_bytes());
    }
}

/// Takes what [`put`] appended off the front. `None`, if the bytes do not hold as many values as they say.
pub(super) fn take(bytes: &mut &[u8]) -> Option<Vec<f32>> {
    let (len, rest) = bytes.split_first_chunk()?;
    let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
    let (values, rest) = rest.split_at_checked(len.checked_mul(size_of::<f32>())?)?;
    *bytes = rest;
    let (values, _) = values.as_chunks();
    Some(
        values
            .iter()
            .map(|value| f32::from_le_bytes(*value))
            .collect(),
    )
}
