use super::*;

fn tools(choice: Value) -> Result<Tools, OpenAiError> {
    let schema = json!({ "type": "object", "properties": { "city": { "type": "string" } }, "required": ["city"] });
    let tools = json!([
        { "type": "function", "function": { "name": "weather", "description": "Get it.", "parameters": schema } },
        { "type": "function", "function": { "name": "now" } },
    ]);
    Tools::of(serde_json::from_value(tools).unwrap(), Some(&choice))
}

fn calls(text: &str) -> (String, Vec<(String, String)>) {
    let (text, calls) = tools(json!("auto")).unwrap().parse_tool_calls(text);
    assert!(calls.iter().all(|call| call.id.starts_with("call_")));
    (text, calls.into_iter().map(|call| (call.name, call.arguments)).collect())
}

#[test]
fn functions_are_described_in_the_system_message() {
    let user = ChatMessage { role: ChatRole::User, content: "Hi".into() };
    let system = ChatMessage { role: ChatRole::System, content: "Be short.".into() };
    let mut messages = vec![user.clone()];
    tools(json!("auto")).unwrap().describe(&mut messages);
    assert_eq!((messages.len(), messages[0].role, &messages[1]), (2, ChatRole::System, &user));
    let mut messages = vec![system.clone(), user.clone()];
    tools(json!("auto")).unwrap().describe(&mut messages);
    assert!(messages.len() == 2 && messages[0].content.starts_with("Be short.\n\nYou can call"));
    assert!(messages[0].content.contains("\"description\":\"Get it.\""), "{}", messages[0].content);
    let mut messages = vec![system.clone(), user];
    tools(json!("none")).unwrap().describe(&mut messages);
    assert_eq!(messages[0], system);
}

#[test]
fn calls_are_read_with_and_without_tags() {
    let weather = || ("weather".to_owned(), json!({ "city": "Bonn" }).to_string());
    let now = || ("now".to_owned(), "{}".to_owned());
    let call = r#"{"name": "weather", "arguments": {"city": "Bonn"}}"#;
    for (text, content, expected) in [
        (format!("<tool_call>\n{call}\n</tool_call>"), "", vec![weather()]),
        (
            format!("I look.\n<tool_call>{call}</tool_call>\n<tool_call>{{\"name\":\"now\"}}</tool_call>"),
            "I look.",
            vec![weather(), now()],
        ),
        (format!("<tool_call>\n{call}"), "", vec![weather()]),
        (call.to_owned(), "", vec![weather()]),
        (format!("```json\n[{call}, {{\"name\": \"now\", \"parameters\": {{}}}}]\n```"), "", vec![weather(), now()]),
    ] {
        assert_eq!(calls(&text), (content.to_owned(), expected), "{text}");
    }
}

#[test]
fn text_that_is_no_call_of_an_existing_function_stays_text() {
    for text in [
        "It is warm.",
        "<tool_call>{\"name\": \"rm\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"weather\", \"arguments\": \"Bonn\"}</tool_call>",
        "<tool_call>{\"name\": </tool_call>",
        "<tool_call>{\"name\": \"now\"}</tool_call> and then more text",
        "{\"name\": \"Bob\", \"age\": 3}",
        "[]",
        "",
    ] {
        assert_eq!(calls(text), (text.to_owned(), vec![]), "{text}");
    }
    let none = tools(json!("none")).unwrap();
    assert_eq!(none.parse_tool_calls("{\"name\": \"now\"}").1, []);
}

#[test]
fn streamed_text_ends_before_anything_that_may_be_a_call() {
    let auto = tools(json!("auto")).unwrap();
    for (text, certain) in [
        ("It is", "It is"),
        ("It is ", "It is"),
        ("It <tool", "It"),
        ("It is <b", "It is <b"),
        ("It\n<tool_call>{", "It"),
        (" {\"na", ""),
        ("```json", ""),
        (" ", ""),
    ] {
        assert_eq!(&text[..auto.safe_prefix_len(text)], certain, "{text:?}");
    }
    assert_eq!(tools(json!("required")).unwrap().safe_prefix_len("It is"), 0);
    assert_eq!(tools(json!("none")).unwrap().safe_prefix_len("{ is "), 5);
}

#[test]
fn required_call_is_a_constraint_of_the_output() {
    let constraint = |choice| match tools(choice).unwrap().constraint() {
        Some(OutputFormat::JsonSchema { schema }) => schema,
        other => panic!("{other:?}"),
    };
    assert_eq!(constraint(json!("required"))["anyOf"].as_array().unwrap().len(), 2);
    let named = constraint(json!({ "type": "function", "function": { "name": "weather" } }));
    assert_eq!(named["properties"]["name"], json!({ "const": "weather" }));
    assert_eq!(named["properties"]["arguments"]["required"], json!(["city"]));
    assert_eq!(tools(json!("auto")).unwrap().constraint(), None);

    let parameters =
        json!({ "$defs": { "C": {} }, "properties": { "c": { "$ref": "#/$defs/C" }, "d": { "$ref": "#" } } });
    let list = json!([{ "type": "function", "function": { "name": "f", "parameters": parameters } }]);
    let referring = Tools::of(serde_json::from_value(list).unwrap(), Some(&json!("required"))).unwrap();
    let Some(OutputFormat::JsonSchema { schema }) = referring.constraint() else { panic!("a schema") };
    let arguments = &schema["properties"]["arguments"];
    assert_eq!(arguments["properties"]["c"]["$ref"], "#/properties/arguments/$defs/C");
    assert_eq!(arguments["properties"]["d"]["$ref"], "#/properties/arguments");
}

#[test]
fn unusable_function_or_choice_is_named() {
    let one = |tool: Value| Tools::of(serde_json::from_value(json!([tool])).unwrap(), None);
    for (result, param) in [
        (one(json!({ "type": "code_interpreter" })), "tools[0].type"),
        (one(json!({ "type": "function" })), "tools[0].function"),
        (one(json!({ "type": "function", "function": { "name": "a b" } })), "tools[0].function.name"),
        (
            one(json!({ "type": "function", "function": { "name": "a", "parameters": 1 } })),
            "tools[0].function.parameters",
        ),
        (tools(json!("always")), "tool_choice"),
        (tools(json!({ "type": "function", "function": { "name": "rm" } })), "tool_choice"),
        (Tools::of(vec![], Some(&json!("required"))), "tool_choice"),
    ] {
        assert_eq!(result.unwrap_err().to_json()["error"]["param"], param);
    }
}

#[test]
fn conversation_with_calls_is_written_in_the_notation_that_is_read() {
    let sent: Vec<RequestToolCall> = serde_json::from_value(json!([
        { "id": "call_1", "type": "function", "function": { "name": "weather", "arguments": "{\"city\":\"Bonn\"}" } },
        { "id": "call_2", "type": "function", "function": { "name": "now", "arguments": "{}" } },
    ]))
    .unwrap();
    let (text, read) = calls(&text_with_tool_calls("I look.".into(), &sent));
    assert_eq!((text.as_str(), read.len(), read[0].1.as_str()), ("I look.", 2, "{\"city\":\"Bonn\"}"));
    assert_eq!(result_text("12 degrees"), "<tool_response>\n12 degrees\n</tool_response>");
}
