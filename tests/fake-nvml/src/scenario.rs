//! What the cards of this make-believe machine are, as a file says it. The file is read again for each question, so a test
//! can change it while a program asks.
//!
//! ```text
//! init = 0                      what the library's start returns; 18 is a driver of another version
//! driver = 580.95.05
//! [card]
//! name = NVIDIA GeForce RTX 3060
//! uuid = GPU-3060
//! capability = 8.6
//! total = 12884901888           bytes, as the next two
//! reserved = 268435456
//! used = 1342177280
//! temperature = 45
//! power = 31500                 milliwatts, as the limit
//! limit = 170000
//! throttle = 4                  the bits of nvml.h
//! compute = 4711 1073741824     a process and its bytes; `self` is the one that asks
//! graphics = 4712 268435456
//! fails = temperature 15        what a question about this card returns; 15 is a lost card, `all` is every question
//! ```

use std::collections::BTreeMap;

/// Names the file.
pub const FILE: &str = "CFQ_FAKE_NVML";

pub struct Scenario {
    pub init: u32,
    pub driver: String,
    pub cards: Vec<Card>,
}

#[derive(Default)]
pub struct Card {
    facts: BTreeMap<String, String>,
    pub compute: Vec<(u32, u64)>,
    pub graphics: Vec<(u32, u64)>,
    fails: BTreeMap<String, u32>,
}

impl Scenario {
    /// `None` without a file: there is no driver then.
    pub fn read() -> Option<Self> {
        let text = std::fs::read_to_string(std::env::var_os(FILE)?).ok()?;
        let mut scenario = Self { init: 0, driver: String::new(), cards: Vec::new() };
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            if line == "[card]" {
                scenario.cards.push(Card::default());
                continue;
            }
            let (key, value) = line.split_once('=')?;
            let (key, value) = (key.trim(), value.trim());
            match scenario.cards.last_mut() {
                Some(card) => card.set(key, value)?,
                None if key == "init" => scenario.init = value.parse().ok()?,
                None => scenario.driver = value.to_owned(),
            }
        }
        Some(scenario)
    }
}

impl Card {
    fn set(&mut self, key: &str, value: &str) -> Option<()> {
        match key {
            "compute" | "graphics" => {
                let (pid, bytes) = value.split_once(' ')?;
                let pid = if pid == "self" { std::process::id() } else { pid.parse().ok()? };
                let list = if key == "compute" { &mut self.compute } else { &mut self.graphics };
                list.push((pid, bytes.parse().ok()?));
            }
            "fails" => {
                let (question, code) = value.split_once(' ')?;
                self.fails.insert(question.to_owned(), code.parse().ok()?);
            }
            _ => {
                self.facts.insert(key.to_owned(), value.to_owned());
            }
        }
        Some(())
    }

    /// What a question returns instead of an answer.
    pub fn fails(&self, question: &str) -> Option<u32> {
        self.fails.get(question).or_else(|| self.fails.get("all")).copied()
    }

    pub fn text(&self, key: &str) -> Option<&str> {
        self.facts.get(key).map(String::as_str)
    }

    pub fn number(&self, key: &str) -> Option<u64> {
        self.text(key)?.parse().ok()
    }
}
