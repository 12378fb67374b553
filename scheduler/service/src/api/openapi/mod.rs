//! The OpenAPI document. Routes are registered together with their descriptions, so every route is in the document; the
//! schemas of replies come from the types of the handlers. The format: <https://spec.openapis.org/oas/v3.1.1.html>.

mod operation;
mod page;
mod reply;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

use axum::Router;
use axum::extract::Request;
use axum::handler::Handler;
use axum::middleware::{self, Next};
use axum::routing::on;
use schemars::generate::SchemaSettings;
use schemars::{Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::{Api, access};

pub use operation::Operation;
pub use page::{is_public, page};
pub use reply::EVENT_STREAM;

use reply::{DocumentedHandler, Outcome, Reply};

/// Path of the document.
pub const DOCUMENT_PATH: &str = "/openapi.json";
/// Where the schemas are in the document.
const SCHEMAS: &str = "/components/schemas";
/// Appended to the name of a schema of requests if that of replies differs: a request may leave out fields that a reply
/// always has.
const INPUT: &str = "Input";

/// The document while routes are registered.
#[derive(Debug)]
pub struct Document {
    paths: Map<String, Value>,
    errors: Map<String, Value>,
    tags: Vec<Value>,
    requests: SchemaGenerator,
    replies: SchemaGenerator,
}

impl Default for Document {
    fn default() -> Self {
        let settings = || SchemaSettings::draft2020_12().with(|settings| settings.definitions_path = SCHEMAS.into());
        Self {
            paths: Map::new(),
            errors: Map::new(),
            tags: Vec::new(),
            requests: settings().for_deserialize().into_generator(),
            replies: settings().for_serialize().into_generator(),
        }
    }
}

impl Document {
    /// Begins a group of operations, or continues the one with this name.
    pub fn group(&mut self, name: &'static str, description: &'static str) -> Group<'_> {
        if !self.tags.iter().any(|tag| tag["name"] == name) {
            self.tags.push(json!({ "name": name, "description": description }));
        }
        Group { document: self, router: Router::new(), tag: name }
    }

    fn add<O: Outcome>(&mut self, operation: &Operation, tag: &str) {
        let mut entry = json!({
            "operationId": operation.id,
            "tags": [tag],
            "summary": operation.summary,
            "responses": self.responses::<O>(operation),
        });
        if !operation.description.is_empty() {
            entry["description"] = json!(operation.description);
        }
        let parameters = self.parameters(operation);
        if !parameters.is_empty() {
            entry["parameters"] = parameters.into();
        }
        if let Some(body) = operation.body {
            let mut content = json!({ "schema": (body.schema)(&mut self.requests) });
            if let Ok(example) = serde_json::from_str::<Value>(operation.example) {
                content["example"] = example;
            }
            entry["requestBody"] = json!({ "required": body.is_required, "content": { "application/json": content } });
        }
        entry["security"] = match operation.role {
            Some(role) => json!([{ "token": [role] }]),
            None => json!([]),
        };
        // The router's notation of a parameter that matches the rest of the path.
        let path = operation.path.replace("{*", "{");
        let methods = self.paths.entry(path).or_insert_with(|| json!({}));
        methods[operation.method.as_str().to_ascii_lowercase()] = entry;
    }

    fn responses<O: Outcome>(&mut self, operation: &Operation) -> Value {
        let mut content: Map<String, Value> = Map::new();
        if operation.content.is_empty() {
            content.extend(O::Reply::content(&mut self.replies).map(|(kind, schema)| entry(kind, schema)));
        } else {
            content.extend(operation.content.iter().map(|(kind, schema)| entry(kind, schema(&mut self.replies))));
        }
        let mut responses = Map::new();
        for status in operation.statuses {
            let description = if *status == 201 { "Created" } else { "OK" };
            responses.insert(status.to_string(), json!({ "description": description, "content": content }));
        }
        // Every request may be refused before it reaches its handler.
        let (name, schema) = O::ERROR;
        responses.insert("default".to_owned(), json!({ "$ref": format!("#/components/responses/{name}") }));
        if !self.errors.contains_key(name) {
            let (kind, schema) = entry("application/json", schema(&mut self.replies));
            let response = json!({ "description": "Refused or failed", "content": { kind: schema } });
            self.errors.insert(name.to_owned(), response);
        }
        responses.into()
    }

    fn parameters(&mut self, operation: &Operation) -> Vec<Value> {
        let mut parameters = Vec::new();
        for part in operation.path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}')) {
            let name = part.trim_start_matches('*');
            let described = operation.path_parameters.iter().find(|(described, _)| *described == name);
            let description = described.map_or_else(|| path_parameter(name), |(_, description)| description);
            parameters.push(json!({
                "name": name, "in": "path", "required": true, "description": description, "schema": { "type": "string" },
            }));
        }
        if let Some(query) = operation.query {
            let query = query(&mut self.requests).to_value();
            let required: Vec<&Value> = query["required"].as_array().into_iter().flatten().collect();
            for (name, schema) in query["properties"].as_object().into_iter().flatten() {
                let mut schema = schema.clone();
                let description = schema.as_object_mut().and_then(|schema| schema.remove("description"));
                without_null(&mut schema);
                let is_required = required.iter().any(|required| *required == name);
                let mut parameter = json!({ "name": name, "in": "query", "required": is_required, "schema": schema });
                if let Some(description) = description {
                    parameter["description"] = description;
                }
                parameters.push(parameter);
            }
        }
        parameters.extend(operation.headers.iter().map(|(name, description)| {
            json!({ "name": name, "in": "header", "description": description, "schema": { "type": "string" } })
        }));
        parameters
    }

    /// The whole document.
    pub fn finish(mut self) -> Value {
        let mut schemas = self.replies.take_definitions(true);
        let requests = self.requests.take_definitions(true);
        let renamed = differing(&requests, &schemas);
        for (name, mut schema) in requests {
            rename(&mut schema, &renamed);
            schemas.insert(input_name(&name, &renamed), schema);
        }
        for operation in self.paths.values_mut().filter_map(Value::as_object_mut).flat_map(|path| path.values_mut()) {
            for part in ["parameters", "requestBody"] {
                if let Some(part) = operation.get_mut(part) {
                    rename(part, &renamed);
                }
            }
        }
        let mut document = json!({
            "openapi": "3.1.1",
            "info": {
                "title": "cfq",
                "version": env!("CARGO_PKG_VERSION"),
                "license": { "name": "MIT", "identifier": "MIT" },
                "description": "The HTTP API of cfq's scheduler, and the OpenAI-compatible API of its models. Every request \
                                needs a bearer token, unless it says otherwise: that from keys/api.token in the data \
                                folder, or one of at least the named role (metrics, read, submit, admin).",
            },
            "security": [{ "token": [] }],
            "tags": self.tags,
            "paths": self.paths,
            "components": {
                "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
                "responses": self.errors,
                "schemas": schemas,
            },
        });
        without_links(&mut document);
        document
    }
}

/// Removes the alternative `null`: a parameter of a query is left out instead.
fn without_null(schema: &mut Value) {
    if let Some(types) = schema.get_mut("type").and_then(Value::as_array_mut) {
        types.retain(|kind| kind != "null");
        if let [only] = &types[..] {
            schema["type"] = only.clone();
        }
    }
    if let Some(alternatives) = schema.get_mut("anyOf").and_then(Value::as_array_mut) {
        alternatives.retain(|alternative| alternative["type"] != "null");
        if let [only] = &alternatives[..] {
            *schema = only.clone();
        }
    }
}

/// Names of the schemas that are in both maps and differ, or refer to one that differs.
fn differing(requests: &Map<String, Value>, replies: &Map<String, Value>) -> BTreeSet<String> {
    let common = || requests.iter().filter_map(|(name, schema)| Some((name, schema, replies.get(name)?)));
    let mut differing: BTreeSet<String> =
        common().filter(|(_, request, reply)| request != reply).map(|(name, ..)| name.clone()).collect();
    loop {
        let refers = |schema: &Value| {
            let text = schema.to_string();
            differing.iter().any(|name| text.contains(&format!("\"#{SCHEMAS}/{name}\"")))
        };
        let more: Vec<String> = common()
            .filter(|(name, request, _)| !differing.contains(*name) && refers(request))
            .map(|(name, ..)| name.clone())
            .collect();
        if more.is_empty() {
            return differing;
        }
        differing.extend(more);
    }
}

/// Replaces links of Rust's documentation in descriptions by the names to which they refer.
fn without_links(value: &mut Value) {
    match value {
        Value::Object(object) => {
            if let Some(Value::String(text)) = object.get_mut("description") {
                while let Some((before, rest)) = text.split_once("[`")
                    && let Some((link, after)) = rest.split_once("`]")
                {
                    let name = link.rsplit("::").next().unwrap_or(link);
                    // The path of the item, if it follows the name.
                    let path = after.strip_prefix('(').and_then(|path| path.split_once(')'));
                    let after = path.map_or(after, |(_, after)| after);
                    *text = format!("{before}`{name}`{after}");
                }
            }
            object.values_mut().for_each(without_links);
        }
        Value::Array(values) => values.iter_mut().for_each(without_links),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn entry(kind: &str, schema: Schema) -> (String, Value) {
    (kind.to_owned(), json!({ "schema": schema }))
}

/// What the path parameters of this name are, unless the operation describes them.
fn path_parameter(name: &str) -> &'static str {
    match name {
        "key" => "Number (`t42`) or id of a task",
        "name" => "Name",
        "number" => "Number",
        _ => "Id",
    }
}

fn input_name(name: &str, renamed: &BTreeSet<String>) -> String {
    if renamed.contains(name) { format!("{name}{INPUT}") } else { name.to_owned() }
}

/// Replaces references to renamed schemas.
fn rename(value: &mut Value, renamed: &BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            if let Some(Value::String(reference)) = object.get_mut("$ref")
                && let Some(name) = reference.strip_prefix("#/components/schemas/")
            {
                *reference = format!("#{SCHEMAS}/{}", input_name(name, renamed));
            }
            object.values_mut().for_each(|value| rename(value, renamed));
        }
        Value::Array(values) => values.iter_mut().for_each(|value| rename(value, renamed)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Operations that are shown together.
#[derive(Debug)]
pub struct Group<'a> {
    document: &'a mut Document,
    router: Router<Api>,
    tag: &'static str,
}

impl Group<'_> {
    /// Registers a handler.
    pub fn add<H, T, Args>(mut self, operation: Operation, handler: H) -> Self
    where
        H: Handler<T, Api> + DocumentedHandler<Args>,
        T: 'static,
    {
        self.document.add::<H::Output>(&operation, self.tag);
        let mut method = on(operation.filter(), handler);
        if let Some(role) = operation.role {
            method = method.layer(middleware::from_fn(move |request: Request, next: Next| {
                access::require_role(role, request, next)
            }));
        }
        if let Some(alias) = operation.alias {
            self.router = self.router.route(alias, method.clone());
        }
        self.router = self.router.route(operation.path, method);
        self
    }

    pub fn into_router(self) -> Router<Api> {
        self.router
    }
}
