//! The second tier: contents of blocks that their pools had no room for, in a bounded place that all models share.
//!
//! Contents are found by everything they depend on: the model, the salt, and all tokens up to the block's end. These form
//! a tree that is walked token by token, so there is no hash that two beginnings could have in common. What was put here
//! or asked for longest ago goes first; pools evict the end of a sequence before its start, and so does this. What is
//! taken back is gone from here, since its pool has it again.
//!
//! Places in the tree cost memory too: they are counted, and gone as soon as nothing below them is held.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Whose contents they are: nothing is shared between two of these.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Kin {
    /// The model, the version of its file, and how its pool stores values.
    pub model: Arc<str>,
    /// As in [`crate::Prefix::empty`].
    pub salt: u8,
}

/// A beginning in the tree. Never used twice, so one that is gone is not mistaken for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place(u64);

/// What a place costs beside its tokens: the node, its entry in the table and in its parent's list.
const PLACE_BYTES: u64 = 192;

#[derive(Debug)]
struct Held<C> {
    content: C,
    bytes: u64,
    used: u64,
}

#[derive(Debug)]
struct Node<C> {
    root: Place,
    /// Itself for a root.
    parent: Place,
    /// Of this block alone; fewer than a block only at the end of a finished sequence.
    tokens: Vec<u32>,
    children: Vec<Place>,
    held: Option<Held<C>>,
}

impl<C> Node<C> {
    fn cost(&self) -> u64 {
        PLACE_BYTES + 4 * self.tokens.len() as u64
    }
}

/// Contents of type `C`, of so many bytes together at most.
#[derive(Debug)]
pub struct Parked<C> {
    positions: usize,
    capacity: u64,
    bytes: u64,
    roots: HashMap<Kin, Place>,
    /// Positions held below each root.
    counts: HashMap<Place, u64>,
    nodes: HashMap<Place, Node<C>>,
    order: BTreeMap<u64, Place>,
    serial: u64,
    clock: u64,
}

impl<C> Parked<C> {
    /// Room for `capacity` bytes of blocks of `positions` positions.
    pub fn new(capacity: u64, positions: usize) -> Self {
        Self {
            positions: positions.max(1),
            capacity,
            bytes: 0,
            roots: HashMap::new(),
            counts: HashMap::new(),
            nodes: HashMap::new(),
            order: BTreeMap::new(),
            serial: 0,
            clock: 0,
        }
    }

    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes taken, those of the places included.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Positions held of a model.
    pub fn tokens(&self, model: &str) -> u64 {
        let own = self.roots.iter().filter(|(kin, _)| &*kin.model == model);
        own.filter_map(|(_, root)| self.counts.get(root)).sum()
    }

    fn place(&mut self, parent: Option<Place>, tokens: &[u32]) -> Place {
        let place = Place(self.serial);
        self.serial += 1;
        let root = parent.and_then(|p| self.nodes.get(&p)).map_or(place, |p| p.root);
        let node =
            Node { root, parent: parent.unwrap_or(place), tokens: tokens.to_vec(), children: Vec::new(), held: None };
        // Roots are few and stay: they are not counted.
        if let Some(parent) = parent.and_then(|p| self.nodes.get_mut(&p)) {
            parent.children.push(place);
            self.bytes += node.cost();
        }
        self.nodes.insert(place, node);
        place
    }

    fn child(&self, parent: Place, tokens: &[u32]) -> Option<Place> {
        let is = |place: &&Place| self.nodes.get(place).is_some_and(|node| node.tokens == tokens);
        self.nodes.get(&parent)?.children.iter().find(is).copied()
    }

    /// The place of a beginning of whole blocks, if anything is held there or below it.
    pub fn at(&self, kin: &Kin, tokens: &[u32]) -> Option<Place> {
        let root = *self.roots.get(kin)?;
        tokens.chunks(self.positions).try_fold(root, |place, chunk| self.child(place, chunk))
    }

    /// Says that what is held of the block at the end of `tokens` was wanted now; false if it is not held.
    pub fn refresh(&mut self, kin: &Kin, tokens: &[u32]) -> bool {
        let Some(place) = self.at(kin, tokens) else { return false };
        let Some(held) = self.nodes.get_mut(&place).and_then(|node| node.held.as_mut()) else { return false };
        self.clock += 1;
        self.order.remove(&held.used);
        held.used = self.clock;
        self.order.insert(self.clock, place);
        true
    }

    /// Puts the content of the block at the end of `tokens` here, and lets go of as much else as it needs. False: it is
    /// larger than everything, or here already.
    pub fn park(&mut self, kin: &Kin, tokens: &[u32], content: C, bytes: u64) -> bool {
        let depth = tokens.len().div_ceil(self.positions) as u64;
        let places = depth.saturating_mul(PLACE_BYTES).saturating_add(4 * tokens.len() as u64);
        if tokens.is_empty() || bytes.saturating_add(places) > self.capacity || self.refresh(kin, tokens) {
            return false;
        }
        let root = match self.roots.get(kin) {
            Some(root) => *root,
            None => {
                let root = self.place(None, &[]);
                self.roots.insert(kin.clone(), root);
                root
            }
        };
        let mut place = root;
        for chunk in tokens.chunks(self.positions) {
            place = match self.child(place, chunk) {
                Some(child) => child,
                None => self.place(Some(place), chunk),
            };
        }
        self.clock += 1;
        if let Some(node) = self.nodes.get_mut(&place) {
            node.held = Some(Held { content, bytes, used: self.clock });
            *self.counts.entry(root).or_default() += node.tokens.len() as u64;
        }
        self.order.insert(self.clock, place);
        self.bytes += bytes;
        while self.bytes > self.capacity {
            let Some((_, oldest)) = self.order.first_key_value() else { break };
            self.remove(*oldest);
        }
        true
    }

    /// Takes the content of the block of `tokens` after `place` out. Its place, to go on from, may be gone with it.
    pub fn take(&mut self, place: Place, tokens: &[u32]) -> Option<(Place, C)> {
        let child = self.child(place, tokens)?;
        Some((child, self.remove(child)?))
    }

    /// Of the blocks after `place`, the one that begins like `tokens` for longest, and for how many positions.
    pub fn partly(&self, place: Place, tokens: &[u32]) -> Option<(usize, &C)> {
        let alike = |child: &Place| {
            let node = self.nodes.get(child)?;
            let held = node.held.as_ref()?;
            Some((node.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count(), &held.content))
        };
        let all = self.nodes.get(&place)?.children.iter().filter_map(alike);
        all.max_by_key(|(count, _)| *count).filter(|(count, _)| *count > 0)
    }

    fn remove(&mut self, place: Place) -> Option<C> {
        let node = self.nodes.get_mut(&place)?;
        let held = node.held.take()?;
        if let Some(count) = self.counts.get_mut(&node.root) {
            *count -= node.tokens.len() as u64;
        }
        self.order.remove(&held.used);
        self.bytes -= held.bytes;
        self.prune(place);
        Some(held.content)
    }

    /// Lets go of places that lead to nothing.
    fn prune(&mut self, mut place: Place) {
        while let Some(node) = self.nodes.get(&place)
            && node.held.is_none()
            && node.children.is_empty()
            && node.parent != place
        {
            let (parent, cost) = (node.parent, node.cost());
            self.nodes.remove(&place);
            self.bytes -= cost;
            if let Some(parent) = self.nodes.get_mut(&parent) {
                parent.children.retain(|child| *child != place);
            }
            place = parent;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use proptest::prelude::*;

    const SIZE: usize = 2;

    fn kin(salt: u8) -> Kin {
        Kin { model: "m".into(), salt }
    }

    #[test]
    fn what_is_parked_is_found_from_its_start_and_taken_once() {
        let mut parked = Parked::new(10_000, SIZE);
        assert!(parked.park(&kin(0), &[1, 2, 3, 4], "second", 100));
        assert!(parked.park(&kin(0), &[1, 2], "first", 100));
        assert!(parked.park(&kin(0), &[1, 2, 3, 4, 5], "end", 100));
        assert!(!parked.park(&kin(0), &[1, 2], "again", 100), "it is here");
        assert_eq!((parked.tokens("m"), parked.tokens("n")), (5, 0));
        assert_eq!(parked.at(&kin(1), &[1, 2]), None, "another salt shares nothing");
        let root = parked.at(&kin(0), &[]).unwrap();
        assert!(parked.take(root, &[1, 3]).is_none());
        let (first, content) = parked.take(root, &[1, 2]).unwrap();
        assert_eq!(content, "first");
        assert!(parked.take(root, &[1, 2]).is_none(), "its pool has it");
        let (second, content) = parked.take(first, &[3, 4]).unwrap();
        assert_eq!((content, parked.partly(second, &[5, 6])), ("second", Some((1, &"end"))));
        assert_eq!(parked.partly(second, &[6]), None);
    }

    #[test]
    fn the_oldest_goes_first_and_what_cannot_fit_is_not_taken() {
        let mut parked = Parked::new(1000, SIZE);
        assert!(!parked.park(&kin(0), &[1, 2], 0, 900), "its place needs room too");
        assert!(parked.park(&kin(0), &[1, 2], 1, 250));
        assert!(parked.park(&kin(0), &[3, 4], 2, 250));
        assert!(parked.refresh(&kin(0), &[1, 2]));
        assert!(parked.park(&kin(0), &[5, 6], 3, 250));
        assert!(parked.at(&kin(0), &[3, 4]).is_none() && parked.at(&kin(0), &[1, 2]).is_some());
        assert!(parked.bytes() <= 1000);
    }

    #[derive(Debug, Clone)]
    enum Op {
        Park { salt: u8, tokens: Vec<u32>, bytes: u64 },
        Refresh { salt: u8, tokens: Vec<u32> },
        Take { salt: u8, tokens: Vec<u32> },
        Partly { salt: u8, tokens: Vec<u32> },
    }

    fn op() -> impl Strategy<Value = Op> {
        let which = || (0u8..2, prop::collection::vec(0u32..2, 1..8));
        prop_oneof![
            5 => (which(), 0u64..600).prop_map(|((salt, tokens), bytes)| Op::Park { salt, tokens, bytes }),
            1 => which().prop_map(|(salt, tokens)| Op::Refresh { salt, tokens }),
            3 => which().prop_map(|(salt, tokens)| Op::Take { salt, tokens }),
            1 => which().prop_map(|(salt, tokens)| Op::Partly { salt, tokens }),
        ]
    }

    /// The same as a list, oldest first: who, all tokens, the serial as content, bytes.
    #[derive(Default)]
    struct Reference(Vec<(u8, Vec<u32>, usize, u64)>);

    impl Reference {
        fn bytes(&self) -> u64 {
            let mut places = BTreeSet::new();
            for (salt, tokens, ..) in &self.0 {
                for end in (SIZE..tokens.len()).step_by(SIZE).chain([tokens.len()]) {
                    places.insert((*salt, tokens[..end].to_vec()));
                }
            }
            let own = |tokens: &Vec<u32>| ((tokens.len() - 1) % SIZE + 1) as u64;
            let places: u64 = places.iter().map(|(_, tokens)| PLACE_BYTES + 4 * own(tokens)).sum();
            places + self.0.iter().map(|(.., bytes)| bytes).sum::<u64>()
        }

        fn find(&self, salt: u8, tokens: &[u32]) -> Option<usize> {
            self.0.iter().position(|(s, t, ..)| *s == salt && t == tokens)
        }
    }

    proptest! {
        /// It holds what a list with the same rules holds, in the same number of bytes, and never more than it may.
        #[test]
        fn it_is_a_bounded_list_of_contents(capacity in 0u64..3000, ops in prop::collection::vec(op(), 1..80)) {
            let mut parked = Parked::new(capacity, SIZE);
            let mut reference = Reference::default();
            for (serial, op) in ops.into_iter().enumerate() {
                match op {
                    Op::Park { salt, tokens, bytes } => {
                        let alone = Reference(vec![(salt, tokens.clone(), serial, bytes)]);
                        let known = reference.find(salt, &tokens);
                        let fits = alone.bytes() <= capacity;
                        prop_assert_eq!(parked.park(&kin(salt), &tokens, serial, bytes), fits && known.is_none());
                        if let (true, Some(at)) = (fits, known) {
                            let again = reference.0.remove(at);
                            reference.0.push(again);
                        } else if fits {
                            reference.0.extend(alone.0);
                            while reference.bytes() > capacity {
                                reference.0.remove(0);
                            }
                        }
                    }
                    Op::Refresh { salt, tokens } => {
                        let known = reference.find(salt, &tokens);
                        prop_assert_eq!(parked.refresh(&kin(salt), &tokens), known.is_some());
                        if let Some(at) = known {
                            let again = reference.0.remove(at);
                            reference.0.push(again);
                        }
                    }
                    Op::Take { salt, tokens } => {
                        let (before, block) = tokens.split_at((tokens.len() - 1) / SIZE * SIZE);
                        let taken = parked.at(&kin(salt), before).and_then(|place| parked.take(place, block));
                        let known = reference.find(salt, &tokens).map(|at| reference.0.remove(at).2);
                        prop_assert_eq!(taken.map(|(_, content)| content), known);
                    }
                    Op::Partly { salt, tokens } => {
                        let (before, block) = tokens.split_at((tokens.len() - 1) / SIZE * SIZE);
                        let place = parked.at(&kin(salt), before);
                        let found = place.and_then(|place| parked.partly(place, block));
                        let alike = |t: &[u32]| t.iter().zip(block).take_while(|(a, b)| a == b).count();
                        let after = reference.0.iter().filter(|(s, t, ..)| {
                            *s == salt && t.starts_with(before) && t.len() > before.len() && t.len() <= before.len() + SIZE
                        });
                        let best = after.map(|(_, t, ..)| alike(&t[before.len()..])).max().unwrap_or(0);
                        prop_assert_eq!(found.map_or(0, |(count, _)| count), best);
                    }
                }
                prop_assert_eq!(parked.bytes(), reference.bytes());
                prop_assert!(parked.bytes() <= capacity);
                prop_assert_eq!(parked.order.len(), reference.0.len());
                let own = |tokens: &[u32]| ((tokens.len() - 1) % SIZE + 1) as u64;
                prop_assert_eq!(parked.tokens("m"), reference.0.iter().map(|(_, t, ..)| own(t)).sum::<u64>());
                prop_assert_eq!(parked.tokens("n"), 0);
                for (salt, tokens, content, _) in &reference.0 {
                    let place = parked.at(&kin(*salt), tokens).unwrap();
                    prop_assert_eq!(parked.nodes[&place].held.as_ref().map(|h| h.content), Some(*content));
                }
            }
        }
    }
}
