//! Property tests of the parser of loop declarations: a valid declaration is parsed to the values that were written, an
//! accepted declaration satisfies the rules, an error names its location, and no text makes the parser panic or run
//! without bound.

use proptest::prelude::*;

use crate::{Declaration, dual_agent, parse};

const BUILT_IN: &str = include_str!("dual-agent.yaml");

/// Values for the generated declarations: those fields that users change.
#[derive(Debug, Clone)]
struct Fields {
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

impl Fields {
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

    /// Whether the fields satisfy the rules, checked independently of the parser.
    fn is_valid(&self) -> bool {
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
    /// Generates mostly valid values; each field is sometimes at or beyond its bounds.
    fn fields()(
        name in "[ a-z]{0,8}", version in "[0-9]\\.[0-9]", creator in "[a-c]", critic in "[a-c]", max_cycles in 0u32..1000,
        pass in prop_oneof![4 => 0.0..=10.0f64, 1 => -1.0..12.0f64],
        timeout_minutes in prop::option::of(prop_oneof![4 => 0.001..1e6f64, 1 => -5.0..=0.0f64]),
        retry_ceiling_minutes in prop::option::of(prop_oneof![4 => 0.001..1e6f64, 1 => -5.0..=0.0f64]),
        stagnation in prop::option::of((prop_oneof![4 => 0.0..=10.0f64, 1 => -1.0..12.0f64], 0u32..5)),
    ) -> Fields {
        Fields { name, version, creator, critic, max_cycles, pass, timeout_minutes, retry_ceiling_minutes, stagnation }
    }
}

/// Checks the rules that every accepted declaration satisfies.
fn satisfies_the_rules(declaration: &Declaration) -> Result<(), TestCaseError> {
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

/// Checks that a text is either accepted and satisfies the rules, or refused with one line that starts with the file
/// name.
fn parses_or_refuses(text: &str) -> Result<(), TestCaseError> {
    match parse("x.yaml", text) {
        Ok(declaration) => satisfies_the_rules(&declaration),
        Err(error) => {
            let message = error.to_string();
            prop_assert!(message.starts_with("x.yaml:") && message.lines().count() == 1, "{message:?}");
            Ok(())
        }
    }
}

proptest! {
    #[test]
    fn valid_fields_are_parsed_and_invalid_ones_refused(fields in fields()) {
        let text = fields.text();
        match parse("x.yaml", &text) {
            Ok(declaration) => {
                prop_assert!(fields.is_valid(), "{text}");
                satisfies_the_rules(&declaration)?;
                prop_assert_eq!(&declaration.transformer.name.value, &fields.name);
                prop_assert_eq!(&declaration.transformer.version, &fields.version);
                prop_assert_eq!(&declaration.resources.creators.value[0].id.value, &fields.creator);
                prop_assert_eq!(&declaration.resources.critics.value[0].id.value, &fields.critic);
                prop_assert_eq!(declaration.methodology.iteration.max_cycles.value, fields.max_cycles);
                prop_assert_eq!(declaration.quality.thresholds.pass.value, fields.pass);
                let guards = declaration.guards;
                prop_assert_eq!(guards.timeout_minutes.map(|m| m.value), fields.timeout_minutes);
                prop_assert_eq!(guards.retry_ceiling_minutes.map(|m| m.value), fields.retry_ceiling_minutes);
                prop_assert_eq!(guards.stagnation.map(|s| (s.min_gain.value, s.cycles.value)), fields.stagnation);
            }
            Err(error) => {
                prop_assert!(!fields.is_valid(), "{error}\n{text}");
                let lines = text.lines().count();
                let place = error.to_string();
                let line: usize = place.split(':').nth(1).unwrap().parse().unwrap();
                prop_assert!((1..=lines).contains(&line), "{place}");
            }
        }
    }

    #[test]
    fn any_text_is_parsed_or_refused(text in "\\PC{0,400}") {
        parses_or_refuses(&text)?;
    }

    #[test]
    fn yaml_of_any_shape_is_parsed_or_refused(text in "([ ]{0,6}[-?:{}\\[\\],&*!|>'\"%@`#a-c0-9~.\n]{0,8}\n){0,30}") {
        parses_or_refuses(&text)?;
    }

    /// The built-in file with parts removed, duplicated or replaced is accepted or refused; the parser never panics.
    #[test]
    fn damaged_declaration_is_parsed_or_refused(
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
        parses_or_refuses(&text.into_iter().collect::<String>())?;
    }
}

#[test]
fn built_in_loop_satisfies_the_rules() {
    satisfies_the_rules(&dual_agent().unwrap()).unwrap();
}

/// Texts that could cost the parser unbounded work are refused with a short error: aliases that multiply, deep nesting,
/// a very long value, a value that contains itself.
#[test]
fn text_that_expands_without_bound_is_refused() {
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

/// Each field that takes a number refuses values that are not a valid number for it.
#[test]
fn invalid_numbers_are_refused() {
    for (field, valid, integer) in [
        ("pass: ", "8.5", false),
        ("timeout-minutes: ", "30", false),
        ("retry-ceiling-minutes: ", "10", false),
        ("min-gain: ", "0.2", false),
        ("max-cycles: ", "5", true),
        ("cycles: ", "2", true),
    ] {
        let line = format!(" {field}{valid}");
        assert!(BUILT_IN.contains(&line), "{line}");
        let with = |value: &str| parse("x.yaml", &BUILT_IN.replacen(&line, &format!(" {field}{value}"), 1));
        for value in [".nan", ".inf", "-.inf", "1e999", "-1", "[]", "0x", "many"] {
            assert!(with(value).is_err(), "{field}{value}");
        }
        for value in ["0.5", "99999999999999999999"].into_iter().filter(|_| integer) {
            assert!(with(value).is_err(), "{field}{value}");
        }
    }
}
