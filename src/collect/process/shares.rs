//! Divides a limit among containers, so that the container with the most does not take it from the others.

/// Returns how much of what each one wants it gets, if all get `total` at most: those that want the least first.
pub fn fair_shares(wanted: &[usize], total: usize) -> Vec<usize> {
    let mut by_want: Vec<usize> = (0..wanted.len()).collect();
    by_want.sort_by_key(|index| wanted[*index]);
    let mut rest = total;
    let mut shares = vec![0; wanted.len()];
    for index in by_want {
        shares[index] = wanted[index].min(rest);
        rest -= shares[index];
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_that_want_the_least_get_all_of_it() {
        assert_eq!(fair_shares(&[], 5), [] as [usize; 0]);
        assert_eq!(fair_shares(&[3, 1, 2], 6), [3, 1, 2]);
        assert_eq!(fair_shares(&[90, 1, 0, 20], 30), [9, 1, 0, 20]);
        assert_eq!(fair_shares(&[5, 5], 5), [5, 0]);
    }
}
