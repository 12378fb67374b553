//! One operation of the API: a method on a path, with what the document says of it beyond the types of its handler.

use axum::http::Method;
use axum::routing::MethodFilter;
use cfq_proto::http::ApiTokenRole;
use schemars::{JsonSchema, Schema, SchemaGenerator};

/// Creates the schema of a type, and adds those that it refers to.
pub type SchemaOf = fn(&mut SchemaGenerator) -> Schema;

/// An operation.
#[derive(Debug, Clone)]
pub struct Operation {
    pub method: Method,
    /// The path, with its parameters in braces.
    pub path: &'static str,
    /// A second path with the same handler, which the document does not list.
    pub alias: Option<&'static str>,
    /// Name of the operation in generated clients; unique.
    pub id: &'static str,
    pub summary: &'static str,
    pub description: &'static str,
    /// What each path parameter is.
    pub path_parameters: Vec<(&'static str, &'static str)>,
    /// Creates the schema of an object with one property for each query parameter.
    pub query: Option<SchemaOf>,
    pub headers: Vec<(&'static str, &'static str)>,
    pub body: Option<Body>,
    /// A body as JSON, which the page offers to send.
    pub example: &'static str,
    /// Status of a successful reply.
    pub statuses: &'static [u16],
    /// Content of a successful reply, if it does not follow from the type of the handler: media type and schema.
    pub content: Vec<(&'static str, SchemaOf)>,
    /// Role that the token of a request needs; `None` if the request needs no token.
    pub role: Option<ApiTokenRole>,
}

#[derive(Debug, Clone, Copy)]
pub struct Body {
    pub schema: SchemaOf,
    pub is_required: bool,
}

impl Operation {
    pub fn get(path: &'static str, id: &'static str, summary: &'static str) -> Self {
        Self::new(Method::GET, path, id, summary)
    }

    pub fn post(path: &'static str, id: &'static str, summary: &'static str) -> Self {
        Self::new(Method::POST, path, id, summary)
    }

    pub fn patch(path: &'static str, id: &'static str, summary: &'static str) -> Self {
        Self::new(Method::PATCH, path, id, summary)
    }

    pub fn delete(path: &'static str, id: &'static str, summary: &'static str) -> Self {
        Self::new(Method::DELETE, path, id, summary)
    }

    fn new(method: Method, path: &'static str, id: &'static str, summary: &'static str) -> Self {
        // What is not marked otherwise is for administrators.
        let role = if method == Method::GET { ApiTokenRole::Read } else { ApiTokenRole::Admin };
        Self {
            method,
            path,
            alias: None,
            id,
            summary,
            description: "",
            path_parameters: Vec::new(),
            query: None,
            headers: Vec::new(),
            body: None,
            example: "",
            statuses: &[200],
            content: Vec::new(),
            role: Some(role),
        }
    }

    /// Serves the same handler at a second path, which the document does not list.
    pub fn alias(self, path: &'static str) -> Self {
        Self { alias: Some(path), ..self }
    }

    pub fn description(self, description: &'static str) -> Self {
        Self { description, ..self }
    }

    /// Describes a parameter of the path.
    pub fn parameter(mut self, name: &'static str, description: &'static str) -> Self {
        self.path_parameters.push((name, description));
        self
    }

    /// Parameters of the query: the fields of `T`.
    pub fn query<T: JsonSchema>(self) -> Self {
        // Not as a component: the parameters are listed one by one.
        Self { query: Some(T::json_schema), ..self }
    }

    pub fn header(mut self, name: &'static str, description: &'static str) -> Self {
        self.headers.push((name, description));
        self
    }

    pub fn body<T: JsonSchema>(self) -> Self {
        Self { body: Some(Body { schema: SchemaGenerator::subschema_for::<T>, is_required: true }), ..self }
    }

    /// A body that may be left out.
    pub fn optional_body<T: JsonSchema>(self) -> Self {
        Self { body: Some(Body { schema: SchemaGenerator::subschema_for::<T>, is_required: false }), ..self }
    }

    pub fn example(self, example: &'static str) -> Self {
        Self { example, ..self }
    }

    pub fn statuses(self, statuses: &'static [u16]) -> Self {
        Self { statuses, ..self }
    }

    /// A content of the reply, instead of that of the handler's type.
    pub fn content<T: JsonSchema>(mut self, media_type: &'static str) -> Self {
        self.content.push((media_type, SchemaGenerator::subschema_for::<T>));
        self
    }

    pub fn without_token(self) -> Self {
        Self { role: None, ..self }
    }

    /// Role that the token of a request needs, if it is not [`ApiTokenRole::Read`] for GET and [`ApiTokenRole::Admin`] for other
    /// methods.
    pub fn role(self, role: ApiTokenRole) -> Self {
        Self { role: Some(role), ..self }
    }

    /// The filter of the router for the method.
    pub(super) fn filter(&self) -> MethodFilter {
        match self.method {
            Method::POST => MethodFilter::POST,
            Method::PATCH => MethodFilter::PATCH,
            Method::DELETE => MethodFilter::DELETE,
            _ => MethodFilter::GET,
        }
    }
}
