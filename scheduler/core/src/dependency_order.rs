//! Order of tasks that depend on each other: predecessors first.

use std::collections::VecDeque;

/// A cycle of dependencies. Each element depends on the next one, and the last one on the first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cycle(pub Vec<usize>);

/// Orders tasks so that each one comes after its predecessors. `predecessors[n]` are the indexes of the tasks on which
/// task `n` depends. Tasks that may be in any order keep theirs.
///
/// # Errors
/// A [`Cycle`] if there is one.
pub fn dependency_order(predecessors: &[Vec<usize>]) -> Result<Vec<usize>, Cycle> {
    let mut open: Vec<usize> = predecessors.iter().map(Vec::len).collect();
    let mut dependents = vec![Vec::new(); predecessors.len()];
    for (task, of_task) in predecessors.iter().enumerate() {
        of_task.iter().for_each(|predecessor| dependents[*predecessor].push(task));
    }
    let mut ready: VecDeque<usize> = (0..open.len()).filter(|task| open[*task] == 0).collect();
    let mut order = Vec::with_capacity(open.len());
    while let Some(task) = ready.pop_front() {
        order.push(task);
        for dependent in &dependents[task] {
            open[*dependent] -= 1;
            if open[*dependent] == 0 {
                ready.push_back(*dependent);
            }
        }
    }
    match open.iter().position(|count| *count > 0) {
        None => Ok(order),
        Some(first) => Err(cycle_from(first, predecessors, &open)),
    }
}

/// Follows predecessors that have not been ordered, until one repeats. Each task that was not ordered has one.
fn cycle_from(first: usize, predecessors: &[Vec<usize>], open: &[usize]) -> Cycle {
    let mut path = vec![first];
    let mut task = first;
    while let Some(next) = predecessors[task].iter().copied().find(|predecessor| open[*predecessor] > 0) {
        if let Some(start) = path.iter().position(|seen| *seen == next) {
            return Cycle(path.split_off(start));
        }
        path.push(next);
        task = next;
    }
    Cycle(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn order_is_stable_and_a_cycle_is_returned_in_the_order_of_its_dependencies() {
        assert_eq!(dependency_order(&[vec![], vec![], vec![]]), Ok(vec![0, 1, 2]));
        assert_eq!(dependency_order(&[vec![2], vec![0], vec![]]), Ok(vec![2, 0, 1]));
        assert_eq!(dependency_order(&[vec![0]]), Err(Cycle(vec![0])));
        // 0 depends on the cycle of 1, 2 and 3, and is not part of it.
        assert_eq!(dependency_order(&[vec![1], vec![2], vec![3], vec![1]]), Err(Cycle(vec![1, 2, 3])));
    }

    /// Whether each task reaches each other one through its predecessors (Warshall's algorithm).
    fn reachable(predecessors: &[Vec<usize>]) -> Vec<Vec<bool>> {
        let count = predecessors.len();
        let mut reaches = vec![vec![false; count]; count];
        for (task, of_task) in predecessors.iter().enumerate() {
            of_task.iter().for_each(|predecessor| reaches[task][*predecessor] = true);
        }
        for middle in 0..count {
            for from in 0..count {
                for to in 0..count {
                    reaches[from][to] |= reaches[from][middle] && reaches[middle][to];
                }
            }
        }
        reaches
    }

    fn graph() -> impl Strategy<Value = Vec<Vec<usize>>> {
        (1usize..9).prop_flat_map(|count| proptest::collection::vec(proptest::collection::vec(0..count, 0..3), count))
    }

    proptest! {
        #[test]
        fn every_order_is_valid_and_every_cycle_is_real(predecessors in graph()) {
            let reaches = reachable(&predecessors);
            let is_cyclic = (0..predecessors.len()).any(|task| reaches[task][task]);
            match dependency_order(&predecessors) {
                Ok(order) => {
                    prop_assert!(!is_cyclic);
                    let mut sorted = order.clone();
                    sorted.sort_unstable();
                    prop_assert_eq!(sorted, (0..predecessors.len()).collect::<Vec<_>>());
                    let place = |task: usize| order.iter().position(|other| *other == task);
                    for (task, of_task) in predecessors.iter().enumerate() {
                        prop_assert!(of_task.iter().all(|predecessor| place(*predecessor) < place(task)));
                    }
                }
                Err(Cycle(cycle)) => {
                    prop_assert!(is_cyclic && !cycle.is_empty());
                    for (n, task) in cycle.iter().enumerate() {
                        let next = cycle[(n + 1) % cycle.len()];
                        prop_assert!(predecessors[*task].contains(&next));
                    }
                }
            }
        }
    }
}
