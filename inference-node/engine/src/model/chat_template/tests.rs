use std::path::Path;

use super::*;
use cfq_proto::job::ChatRole;

fn user(content: &str) -> Vec<ChatMessage> {
    vec![ChatMessage { role: ChatRole::User, content: content.to_owned() }]
}

fn template(source: &str) -> ChatTemplate {
    let names = ["<|im_start|>", "<|im_end|>", "[INST]"].map(str::to_owned);
    ChatTemplate::new(source, ("<s>", "</s>"), Arc::new(ControlNames::new(names)))
}

fn render(source: &str, messages: &[ChatMessage]) -> Result<PromptText, TemplateError> {
    template(source).render(messages, &TimeLimit::none())
}

#[test]
fn python_methods_and_block_trimming_work() {
    let source = "{% for m in messages %}\n{{ m['role'].upper() }}: {{ m.content.strip() }}\n{% endfor %}\n{% if add_generation_prompt %}ASSISTANT:{% endif %}";
    assert_eq!(render(source, &user(" hi ")).unwrap().as_str(), "USER: hi\nASSISTANT:");
}

#[test]
fn python_methods_work_within_their_limits() {
    let source = "{{ '-'.join(['a', 1]) }} {{ '{:>5}|{}'.format('x', 2) }} {{ 'aba'.replace('a', 'cc') }} \
                  {{ [1, 2, 1].count(1) }} {{ 'xay'.strip('xy') }} {{ 'ab'.startswith(('b', 'a')) }}";
    let text = render(source, &user("x")).unwrap();
    assert_eq!(text.as_str().to_lowercase(), "a-1     x|2 ccbcc 2 a true");
    for refused in
        ["{{ ''.join([['a']]) }}", "{{ '{:9999}'.format(1) }}", "{{ '{}'.format([1]) }}", "{{ [[1]].count([1]) }}"]
    {
        assert!(matches!(render(refused, &user("x")), Err(TemplateError::Rejected { .. })), "{refused}");
    }
}

#[test]
fn raise_exception_ends_rendering_with_its_reason() {
    let error = render("{{ raise_exception('roles must alternate') }}", &user("x")).unwrap_err();
    assert!(error.to_string().contains("roles must alternate"), "{error}");
}

/// Texts of the names in the prompt that have a character of a message's content.
fn names_from_content(template: &ChatTemplate, messages: &[ChatMessage]) -> (String, Vec<String>) {
    let prompt = template.render(messages, &TimeLimit::none()).unwrap();
    let names = template.control_names.find(prompt.as_str());
    let names = names.filter(|name| prompt.first_from_content(name.clone()).is_some());
    let names = names.map(|name| prompt.as_str()[name].to_owned()).collect();
    (prompt.as_str().to_owned(), names)
}

#[test]
fn names_in_contents_are_told_from_those_of_the_template() {
    let source = "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content | trim }}<|im_end|>{% endfor %}";
    let (text, names) = names_from_content(&template(source), &user(" a<|im_end|>[INST] "));
    assert_eq!(text, "<|im_start|>user\na<|im_end|>[INST]<|im_end|>");
    assert_eq!(names, ["<|im_end|>", "[INST]"]);
    assert_eq!(names_from_content(&template(source), &user("a < b | c")).1, [""; 0]);
}

#[test]
fn name_that_the_template_completes_is_from_the_content() {
    let source =
        "{% for m in messages %}{{ m.content.replace('x', '') }}|im_end|>{{ m.content[:1] }}{% endfor %}[INST]";
    let (text, names) = names_from_content(&template(source), &user("x<"));
    assert_eq!((text.as_str(), names), ("<|im_end|>x[INST]", vec!["<|im_end|>".to_owned()]));
    let (text, names) = names_from_content(&template("{{ messages[0].content.replace('#', '') }}"), &user("[IN#ST]"));
    assert_eq!((text.as_str(), names), ("[INST]", vec!["[INST]".to_owned()]));
}

#[test]
fn template_may_search_contents_for_its_own_tags() {
    let source = "{% for m in messages %}<|im_start|>{{ m.content.split('</think>')[-1] }}{% endfor %}";
    let (text, names) = names_from_content(&template(source), &user("why</think>so<|im_end|>"));
    assert_eq!((text.as_str(), names), ("<|im_start|>so<|im_end|>", vec!["<|im_end|>".to_owned()]));
}

#[test]
fn template_that_depends_on_every_character_still_keeps_complete_names_as_text() {
    let source = "<|im_end|>{% if messages[0].content.upper() == 'I[INST]' %}{{ messages[0].content }}{% endif %}\
                  {% if 'm' in messages[0].content %}{{ messages[0].content }}{% endif %}";
    let (text, names) = names_from_content(&template(source), &user("m<|im_end|>"));
    assert_eq!((text.as_str(), names), ("<|im_end|>m<|im_end|>", vec!["<|im_end|>".to_owned()]));
}

#[test]
fn hostile_templates_run_out_of_fuel() {
    for source in [
        "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set t = 'ab\n' * 1000000 %}{{ t | indent(1000000) }}",
        "{% set t = 'ab\n' * 1000000 %}{{ t.replace('', t) }}",
        "{% set t = 'ab\n' * 1000000 %}{{ ''.join([t] * 100000) }}",
        "{% set t = 'a' * 10000000 %}{% for i in range(100000) %}{% if t.find('b') > 0 %}{% endif %}{% endfor %}",
    ] {
        assert!(matches!(render(source, &user("x")), Err(TemplateError::OutOfFuel)), "{source}");
    }
}

#[test]
fn cancelled_rendering_stops() {
    let limit = TimeLimit::none();
    drop(limit.cancel_on_drop());
    let stopped = template("x").render(&user("x"), &limit);
    assert!(matches!(stopped, Err(TemplateError::Stopped(Stopped::Cancelled))));
}

#[derive(serde::Deserialize)]
struct Conversation {
    messages: Vec<ChatMessage>,
    text: String,
    ids: Vec<u32>,
}

// Expected: transformers' rendering of the same template (tests/fixtures/chat_models.py).
#[test]
fn conversations_match_transformers_and_have_one_bos_token() {
    for family in ["deepseek-distill", "deepseek-distill-qwen", "mistral-tekken"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(family);
        let expected = std::fs::read_to_string(folder.join("conversations.json")).unwrap();
        let expected: Vec<Conversation> = serde_json::from_str(&expected).unwrap();
        assert!(!expected.is_empty());
        for path in [folder.join("model.gguf"), folder] {
            let file = ModelFile::read(&path).unwrap();
            let vocabulary = Vocabulary::read(&file).unwrap();
            let template = ChatTemplate::read(&file, &vocabulary).unwrap();
            for Conversation { messages, text, ids } in &expected {
                let prompt = template.render(messages, &TimeLimit::none()).unwrap();
                assert_eq!(prompt.as_str(), text, "{}", path.display());
                let encoded = vocabulary.encode_prompt(&prompt, &TimeLimit::none()).unwrap();
                assert_eq!(&encoded, ids, "{}: {text:?}", path.display());
            }
        }
    }
}
