use std::collections::BTreeSet;

use serde_json::Value;

use crate::api::openapi_document;

fn references<'a>(value: &'a Value, found: &mut BTreeSet<&'a str>) {
    match value {
        Value::Object(object) => {
            found.extend(object.get("$ref").and_then(Value::as_str));
            object.values().for_each(|value| references(value, found));
        }
        Value::Array(values) => values.iter().for_each(|value| references(value, found)),
        _ => {}
    }
}

fn operations(document: &Value) -> Vec<(&str, &str, &Value)> {
    let paths = document["paths"].as_object().unwrap().iter();
    paths
        .flat_map(|(path, methods)| {
            let methods = methods.as_object().unwrap().iter();
            methods.map(move |(method, operation)| (path.as_str(), method.as_str(), operation))
        })
        .collect()
}

#[test]
fn references_are_resolved_and_names_are_unique() {
    let document = openapi_document();
    let mut found = BTreeSet::new();
    references(&document, &mut found);
    assert!(found.len() > 100, "{}", found.len());
    for reference in found {
        let pointer = reference.strip_prefix('#').expect(reference);
        assert!(document.pointer(pointer).is_some(), "{reference}");
    }
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    for name in document["components"]["schemas"].as_object().unwrap().keys() {
        assert!(name.chars().all(is_allowed), "{name}");
    }
    let ids: Vec<&str> =
        operations(&document).iter().map(|(_, _, entry)| entry["operationId"].as_str().unwrap()).collect();
    assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len());
}

#[test]
fn every_operation_describes_its_reply_its_errors_and_its_parameters() {
    let document = openapi_document();
    for (path, method, operation) in operations(&document) {
        let at = format!("{method} {path}: {operation:#}");
        let responses = operation["responses"].as_object().unwrap();
        for (status, response) in responses.iter().filter(|(status, _)| *status != "default") {
            let contents = response["content"].as_object().unwrap();
            assert!(!contents.is_empty(), "{status} of {at}");
            // A schema that allows everything describes nothing.
            assert!(contents.values().all(|content| content["schema"].is_object()), "{at}");
            assert!(
                !contents.values().any(|content| content["schema"]["$ref"].to_string().contains("AnyValue")),
                "{at}"
            );
        }
        let error = if path.starts_with("/v1/") { "OpenAiError" } else { "Error" };
        let default = operation["responses"]["default"]["$ref"].as_str();
        assert!(default.is_some_and(|name| name.ends_with(&format!("/{error}"))), "{at}");
        let in_path = |parameter: &&Value| parameter["in"] == "path";
        let parameters: Vec<&Value> = operation["parameters"].as_array().into_iter().flatten().collect();
        assert_eq!(parameters.iter().copied().filter(|p| in_path(p)).count(), path.matches('{').count(), "{at}");
        assert!(parameters.iter().all(|parameter| parameter["description"].is_string()), "{at}");
        assert!(!parameters.iter().any(|parameter| parameter["schema"].to_string().contains("\"null\"")), "{at}");
        let is_public = operation["security"].as_array().is_some_and(Vec::is_empty);
        assert_eq!(is_public, ["/healthz", "/readyz", "/api/v1/join"].contains(&path), "{at}");
    }
}

/// The pages for people have every path.
#[test]
fn reference_pages_have_every_path() {
    let pages = ["http-api.md", "openai-api.md"].map(|page| {
        let path = format!("{}/../../docs/reference/{page}", env!("CARGO_MANIFEST_DIR"));
        std::fs::read_to_string(path).unwrap()
    });
    let document = openapi_document();
    for (path, method, _) in operations(&document) {
        let documented = path.replace("{which}", "{iteration}").replace("{model}", "{id}");
        let entry = format!("{} {documented}", method.to_ascii_uppercase());
        let is_named = pages
            .iter()
            .any(|page| page.match_indices(&entry).any(|(at, _)| page[at + entry.len()..].starts_with(['`', '?'])));
        assert!(is_named, "{entry} is on no page");
    }
}

#[test]
fn examples_have_the_required_fields_and_no_unknown_ones() {
    let document = openapi_document();
    let mut examples = 0;
    for (path, method, operation) in operations(&document) {
        let content = &operation["requestBody"]["content"]["application/json"];
        let Some(example) = content.get("example") else { continue };
        examples += 1;
        let name = content["schema"]["$ref"].as_str().unwrap().strip_prefix('#').unwrap();
        let schema = document.pointer(name).unwrap();
        let fields = example.as_object().unwrap();
        for field in fields.keys() {
            assert!(schema["properties"].get(field).is_some(), "{method} {path}: {field}");
        }
        for required in schema["required"].as_array().into_iter().flatten() {
            assert!(fields.contains_key(required.as_str().unwrap()), "{method} {path}: {required}");
        }
    }
    assert!(examples >= 5, "{examples}");
}

#[test]
fn descriptions_have_no_links_of_rust() {
    let document = openapi_document().to_string();
    for link in ["[`", "crate::"] {
        assert_eq!(document.find(link).map(|at| document.get(at - 100..at + 50)), None);
    }
}

#[test]
fn type_with_fields_that_only_requests_may_leave_out_has_two_schemas() {
    let document = openapi_document();
    let schemas = &document["components"]["schemas"];
    let required = |name: &str| schemas[name]["required"].as_array().map_or(0, Vec::len);
    assert!(required("TaskSpec") > required("TaskSpecInput"), "{:#}", schemas["TaskSpecInput"]);
    let body = document.pointer("/paths/~1api~1v1~1tasks/post/requestBody/content/application~1json/schema/$ref");
    assert_eq!(body.unwrap(), "#/components/schemas/TaskSpecInput");
    // Types that are the same in requests and replies have one schema.
    for (name, schema) in schemas.as_object().unwrap() {
        if let Some(twin) = name.strip_suffix("Input").and_then(|name| schemas.get(name)) {
            assert_ne!(schema.to_string().replace("Input\"", "\""), twin.to_string(), "{name}");
        }
    }
}
