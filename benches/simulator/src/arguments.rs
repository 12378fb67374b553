//! Arguments of the simulator's programs: `--name value`, and texts without a name.

use std::collections::BTreeMap;
use std::str::FromStr;

use anyhow::{Context, anyhow, bail};

/// Parsed arguments.
#[derive(Debug, Default)]
pub struct Arguments {
    named: BTreeMap<String, String>,
    /// The texts without a name, in their order.
    pub positional: Vec<String>,
}

impl Arguments {
    /// Parses the process's arguments; `names` are the known ones.
    pub fn parse(names: &[&str]) -> anyhow::Result<Self> {
        Self::of(std::env::args().skip(1), names)
    }

    fn of(mut texts: impl Iterator<Item = String>, names: &[&str]) -> anyhow::Result<Self> {
        let mut arguments = Self::default();
        while let Some(text) = texts.next() {
            match text.strip_prefix("--") {
                Some(name) if names.contains(&name) => {
                    let value = texts.next().with_context(|| format!("--{name} requires a value"))?;
                    arguments.named.insert(name.to_owned(), value);
                }
                Some(name) => bail!("unknown argument --{name}; known: --{}", names.join(", --")),
                None => arguments.positional.push(text),
            }
        }
        Ok(arguments)
    }

    /// The value of an argument, or the default.
    pub fn get<T: FromStr>(&self, name: &str, default: T) -> anyhow::Result<T> {
        match self.named.get(name) {
            None => Ok(default),
            Some(text) => text.parse().map_err(|_| anyhow!("--{name} cannot be {text:?}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_parsed_and_mistakes_are_named() {
        let parse = |text: &str| Arguments::of(text.split(' ').map(str::to_owned), &["seed"]);
        let arguments = parse("trace --seed 7").unwrap();
        assert_eq!((arguments.positional, arguments.named["seed"].as_str()), (vec!["trace".to_owned()], "7"));
        assert!(parse("--speed 7").unwrap_err().to_string().contains("--seed"));
        assert!(parse("--seed").unwrap_err().to_string().contains("requires a value"));
        assert!(parse("--seed x").unwrap().get("seed", 1u64).unwrap_err().to_string().contains("\"x\""));
    }
}
