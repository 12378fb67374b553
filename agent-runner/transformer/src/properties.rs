//! What holds for every text: a declaration that means something comes back as it was meant, one that is accepted keeps the
//! rules, one that is refused says where, and nothing makes the parser panic or run away.

use proptest::prelude::*;

use crate::{Declaration, dual_agent, parse};

const BUILT_IN: &str = include_str!("dual-agent.yaml");

/// The fields that a person varies, as they would be typed.
#[derive(Debug, Clone)]
struct Meant {
    name: String,
    version: String,
    creator: String,
    critic: String,
    max_cycles: u32,
    pass: f64,
    timeout_minutes: Option<f64>,
    retry_ceiling_minutes: Option<f64>,
    stagnation: Option<(f64, u32)>,
}

impl Meant {
    fn text(&self) -> String {
        let quoted = |text: &str| format!("{text:?}");
        let mut text = format!(
            "transformer:\n  name: {}\n  type: quality\n  version: {}\nresources:\n  creators:\n    - id: {}\n      prompt: a\n  \
             critics:\n    - {{id: {}, prompt: b}}\nmethodology:\n  mode: sequential-chain\n  critic-execution: serial\n  \
             iteration: {{max-cycles: {}}}\nquality:\n  thresholds:\n    pass: {:?}\n",
            quoted(&self.name),
            quoted(&self.version),
            quoted(&self.creator),
            quoted(&self.critic),
            self.max_cycles,
            self.pass
        );
        let mut guards = String::new();
        if let Some(minutes) = self.timeout_minutes {
            guards += &format!("  timeout-minutes: {minutes:?}\n");
        }
        if let Some(minutes) = self.retry_ceiling_minutes {
            guards += &format!("  retry-ceiling-minutes: {minutes:?}\n");
        }
        if let Some((gain, cycles)) = self.stagnation {
            guards += &format!("  stagnation: {{min-gain: {gain:?}, cycles: {cycles}}}\n");
        }
        if !guards.is_empty() {
            text += &format!("guards:\n{guards}");
        }
        text
    }

    /// The rules, said a second time and independently of the parser.
    fn may_pass(&self) -> bool {
        let minutes = |m: Option<f64>| m.is_none_or(|m| m > 0.0);
        !self.name.trim().is_empty()
            && self.creator != self.critic
            && self.max_cycles > 0
            && (0.0..=10.0).contains(&self.pass)
            && minutes(self.timeout_minutes)
            && minutes(self.retry_ceiling_minutes)
            && self.stagnation.is_none_or(|(gain, cycles)| (0.0..=10.0).contains(&gain) && cycles > 0)
    }
}

prop_compose! {
    /// Mostly sound, each field now and then at or beyond its edge.
    fn meant()(
        name in "[ a-z]{0,8}", version in "[0-9]\\.[0-9]", creator in "[a-c]", critic in "[a-c]", max_cycles in 0u32..1000,
        pass in prop_oneof![4 => 0.0..=10.0f64, 1 => -1.0..12.0f64],
        timeout_minutes in prop::option::of(prop_oneof![4 => 0.001..1e6f64, 1 => -5.0..=0.0f64]),
        retry_ceiling_minutes in prop::option::of(prop_oneof![4 => 0.001..1e6f64, 1 => -5.0..=0.0f64]),
        stagnation in prop::option::of((prop_oneof![4 => 0.0..=10.0f64, 1 => -1.0..12.0f64], 0u32..5)),
    ) -> Meant {
        Meant { name, version, creator, critic, max_cycles, pass, timeout_minutes, retry_ceiling_minutes, stagnation }
    }
}

/// What every accepted declaration promises to the engine.
fn keeps_the_rules(declaration: &Declaration) -> Result<(), TestCaseError> {
    let Declaration { transformer, resources, methodology, quality, guards } = declaration;
    prop_assert!(!transformer.name.value.trim().is_empty());
    prop_assert_eq!(&transformer.kind.value, "quality");
    let (creators, critics) = (&resources.creators.value, &resources.critics.value);
    prop_assert_eq!((creators.len(), critics.len()), (1, 1));
    prop_assert_ne!(&creators[0].id.value, &critics[0].id.value);
    prop_assert!(methodology.iteration.max_cycles.value >= 1);
    prop_assert!((0.0..=10.0).contains(&quality.thresholds.pass.value));
    for minutes in [&guards.timeout_minutes, &guards.retry_ceiling_minutes].into_iter().flatten() {
        prop_assert!(minutes.value.is_finite() && minutes.value > 0.0);
    }
    if let Some(stagnation) = &guards.stagnation {
        prop_assert!((0.0..=10.0).contains(&stagnation.min_gain.value) && stagnation.cycles.value >= 1);
    }
    Ok(())
}

/// Parses whatever it is; what is refused is refused in words that begin with the file.
fn survives(text: &str) -> Result<(), TestCaseError> {
    match parse("x.yaml", text) {
        Ok(declaration) => keeps_the_rules(&declaration),
        Err(error) => {
            let message = error.to_string();
            prop_assert!(message.starts_with("x.yaml:") && message.lines().count() == 1, "{message:?}");
            Ok(())
        }
    }
}

proptest! {
    #[test]
    fn what_is_meant_comes_back_and_what_breaks_a_rule_is_refused(meant in meant()) {
        let text = meant.text();
        match parse("x.yaml", &text) {
            Ok(declaration) => {
                prop_assert!(meant.may_pass(), "{text}");
                keeps_the_rules(&declaration)?;
                prop_assert_eq!(&declaration.transformer.name.value, &meant.name);
                prop_assert_eq!(&declaration.transformer.version, &meant.version);
                prop_assert_eq!(&declaration.resources.creators.value[0].id.value, &meant.creator);
                prop_assert_eq!(&declaration.resources.critics.value[0].id.value, &meant.critic);
                prop_assert_eq!(declaration.methodology.iteration.max_cycles.value, meant.max_cycles);
                prop_assert_eq!(declaration.quality.thresholds.pass.value, meant.pass);
                let guards = declaration.guards;
                prop_assert_eq!(guards.timeout_minutes.map(|m| m.value), meant.timeout_minutes);
                prop_assert_eq!(guards.retry_ceiling_minutes.map(|m| m.value), meant.retry_ceiling_minutes);
                prop_assert_eq!(guards.stagnation.map(|s| (s.min_gain.value, s.cycles.value)), meant.stagnation);
            }
            Err(error) => {
                prop_assert!(!meant.may_pass(), "{error}\n{text}");
                let lines = text.lines().count();
                let place = error.to_string();
                let line: usize = place.split(':').nth(1).unwrap().parse().unwrap();
                prop_assert!((1..=lines).contains(&line), "{place}");
            }
        }
    }

    #[test]
    fn any_text_is_parsed_or_refused(text in "\\PC{0,400}") {
        survives(&text)?;
    }

    #[test]
    fn yaml_of_any_shape_is_parsed_or_refused(text in "([ ]{0,6}[-?:{}\\[\\],&*!|>'\"%@`#a-c0-9~.\n]{0,8}\n){0,30}") {
        survives(&text)?;
    }

    /// The built-in file with pieces taken out, doubled, or replaced: most of it stays plausible.
    #[test]
    fn a_damaged_declaration_is_parsed_or_refused(
        cuts in prop::collection::vec((any::<prop::sample::Index>(), 0usize..40, "\\PC{0,6}|[0-9eE.+-]{1,8}|\n *", any::<bool>()), 1..6),
    ) {
        let mut text: Vec<char> = BUILT_IN.chars().collect();
        for (at, length, put, double) in cuts {
            let at = at.index(text.len().max(1)).min(text.len());
            let end = (at + length).min(text.len());
            let taken: Vec<char> = text.drain(at..end).collect();
            let put = put.chars().chain(if double { [taken.clone(), taken].concat() } else { vec![] });
            text.splice(at..at, put.collect::<Vec<_>>());
        }
        survives(&text.into_iter().collect::<String>())?;
    }
}

#[test]
fn the_built_in_loop_is_one_of_them() {
    keeps_the_rules(&dual_agent().unwrap()).unwrap();
}

/// Small texts that ask for much: aliases that multiply, depth, length.
#[test]
fn what_is_made_to_run_away_is_refused() {
    let mut multiplied = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
    for n in 1..30 {
        let aliases = vec![format!("*a{}", n - 1); 9].join(", ");
        multiplied += &format!("a{n}: &a{n} [{aliases}]\n");
    }
    let deep = |open: &str, close: &str| format!("transformer: {}{}", open.repeat(50_000), close.repeat(50_000));
    let nested: String = (0..3_000).map(|n| format!("{}a:\n", " ".repeat(n))).collect();
    let long = format!("transformer:\n  name: {}\n", "x".repeat(2_000_000));
    let itself = "transformer: &t\n  name: *t\n".to_owned();
    for text in [multiplied, deep("[", "]"), deep("{a: ", "}"), nested, long, itself] {
        let error = parse("x.yaml", &text).unwrap_err().to_string();
        assert!(error.starts_with("x.yaml:") && error.len() < 10_000, "{}", error.len());
    }
}

/// What is no number, or none that makes sense, in each place that takes one.
#[test]
fn numbers_that_are_none_are_refused() {
    for (field, sound, whole) in [
        ("pass: ", "8.5", false),
        ("timeout-minutes: ", "30", false),
        ("retry-ceiling-minutes: ", "10", false),
        ("min-gain: ", "0.2", false),
        ("max-cycles: ", "5", true),
        ("cycles: ", "2", true),
    ] {
        let line = format!(" {field}{sound}");
        assert!(BUILT_IN.contains(&line), "{line}");
        let with = |odd: &str| parse("x.yaml", &BUILT_IN.replacen(&line, &format!(" {field}{odd}"), 1));
        for odd in [".nan", ".inf", "-.inf", "1e999", "-1", "[]", "0x", "many"] {
            assert!(with(odd).is_err(), "{field}{odd}");
        }
        for odd in ["0.5", "99999999999999999999"].into_iter().filter(|_| whole) {
            assert!(with(odd).is_err(), "{field}{odd}");
        }
    }
}
