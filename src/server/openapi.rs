//! The description of the API (OpenAPI 3.1), generated from the types that are sent. `docs/api/openapi.json` is this document; a test keeps
//! the two in step.

use axum::response::{IntoResponse, Response};
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::api::processes::{AgentView, ExplainView};
use super::api::stacks::RangeView;
use crate::census::Census;
use crate::fragmentation::verdict::Verdict;
use crate::model::map::MapView;
use crate::model::profile::ProfileView;
use crate::model::view::{ProcessView, ProcessesView};
use crate::retention::Leaks;
use crate::retention::owners::Owners;
use crate::store::view::{DiffView, EventView, EventsView, HistoryView, PastProcesses};

/// A parameter: name, JSON type, description.
type Parameter = (&'static str, &'static str, &'static str);

const PID: Parameter = ("pid", "integer", "Process id in the agent's pid namespace.");
const ID: Parameter = ("id", "integer", "The event's id.");
const FROM: Parameter = ("from", "number", "Start, seconds since the Unix epoch; negative = seconds before now.");
const TO: Parameter = ("to", "number", "End, seconds since the Unix epoch; negative = seconds before now. Default: now.");
const TICKS: Parameter = (
    "start_ticks",
    "integer",
    "Start time of the process, to identify it among those with the same pid. Default: the running one, or the last one.",
);
const BY: Parameter = ("by", "string", "Value: live (the default), allocated, survivors, pinned, blocked, growth, peak or touched.");
const FORMAT: Parameter = ("format", "string", "tree (the default), stacks (the object of `report --json`), folded, or pprof (gzipped).");
const MIN_RATIO: Parameter = ("min_ratio", "number", "Smallest share of the whole for a node of the tree, 0 to 1. Default: 0.0005.");

/// One path.
struct Endpoint {
    path: &'static str,
    summary: &'static str,
    query: &'static [Parameter],
    /// Name of the answer's schema; empty = not JSON.
    answer: &'static str,
    refusals: &'static [u16],
}

const ENDPOINTS: &[Endpoint] = &[
    Endpoint { path: "/metrics", summary: "Prometheus exposition, text format 0.0.4.", query: &[], answer: "", refusals: &[] },
    Endpoint { path: "/healthz", summary: "200 while the census thread is alive, else 503.", query: &[], answer: "", refusals: &[503] },
    Endpoint {
        path: "/readyz",
        summary: "200 once every process found at start has had its first census, else 503.",
        query: &[],
        answer: "",
        refusals: &[503],
    },
    Endpoint { path: "/api/v1/openapi.json", summary: "This document.", query: &[], answer: "", refusals: &[] },
    Endpoint { path: "/api/v1/agent", summary: "The agent, and what it can answer.", query: &[], answer: "AgentView", refusals: &[] },
    Endpoint {
        path: "/api/v1/processes",
        summary: "All watched processes with their ladders, verdicts and growth.",
        query: &[],
        answer: "ProcessesView",
        refusals: &[],
    },
    Endpoint { path: "/api/v1/processes/{pid}", summary: "One of them.", query: &[], answer: "ProcessView", refusals: &[404] },
    Endpoint {
        path: "/api/v1/processes/{pid}/heap",
        summary: "Its newest full or sampled census: the object of `fragprof census --json`.",
        query: &[],
        answer: "Census",
        refusals: &[404],
    },
    Endpoint {
        path: "/api/v1/processes/{pid}/explain",
        summary: "Its verdict, the object of `fragprof explain --json`, and what earlier predictions of its remedies were worth.",
        query: &[],
        answer: "ExplainView",
        refusals: &[404],
    },
    Endpoint {
        path: "/api/v1/processes/{pid}/map",
        summary: "Its heaps' address space, page by page or in larger cells. Takes a full census if the last map is older than a minute; 429 while the census's budget is used up, 422 for heaps too large to walk.",
        query: &[
            ("from", "string", "First address, decimal or hexadecimal with 0x."),
            ("to", "string", "First address after the range."),
            ("cells", "integer", "Approximate number of cells, 1 to 16384. Default: 2048."),
        ],
        answer: "MapView",
        refusals: &[404, 422, 429, 503],
    },
    Endpoint {
        path: "/api/v1/processes/{pid}/profile",
        summary: "Its bytes by call stack, from the tiers that know stacks.",
        query: &[
            BY,
            FORMAT,
            MIN_RATIO,
            (
                "at",
                "number",
                "Time, seconds since the Unix epoch, negative = before now: returns the history's last profile at or before it.",
            ),
            TICKS,
            (
                "seconds",
                "integer",
                "Records every allocation for this time first, if profile.on_demand allows it; costs the target about 2 µs per allocation.",
            ),
        ],
        answer: "ProfileView",
        refusals: &[403, 404, 409, 422, 503],
    },
    Endpoint {
        path: "/api/v1/processes/{pid}/stacks",
        summary: "The call stacks of the blocks in a range of addresses, from the newest exact recording on request (profile?seconds=).",
        query: &[
            ("from", "string", "First address, decimal or hexadecimal with 0x."),
            ("to", "string", "First address after the range."),
            ("top", "integer", "Most stacks returned, 1 to 200. Default: 10."),
        ],
        answer: "RangeView",
        refusals: &[404],
    },
    Endpoint {
        path: "/api/v1/processes/{pid}/history",
        summary: "Its ladder over time; by default the last hour.",
        query: &[FROM, TO, ("points", "integer", "Most points returned, 1 to 2000. Default: 300."), TICKS],
        answer: "HistoryView",
        refusals: &[404, 503],
    },
    Endpoint {
        path: "/api/v1/processes/{pid}/diff",
        summary: "What changed between two times: the ladder, and the stacks if there are two profiles.",
        query: &[FROM, TO, BY, TICKS],
        answer: "DiffView",
        refusals: &[404, 503],
    },
    Endpoint {
        path: "/api/v1/history",
        summary: "The processes in the history within a span, running or not.",
        query: &[FROM, TO],
        answer: "PastProcesses",
        refusals: &[404, 503],
    },
    Endpoint {
        path: "/api/v1/events",
        summary: "Flight records, the newest first; by default of the last week.",
        query: &[
            FROM,
            TO,
            ("limit", "integer", "Most records returned, 1 to 500. Default: 50."),
            ("pid", "integer", "Only those of this process."),
        ],
        answer: "EventsView",
        refusals: &[],
    },
    Endpoint { path: "/api/v1/events/{id}", summary: "One of them.", query: &[], answer: "EventView", refusals: &[404, 503] },
    Endpoint {
        path: "/api/v1/events/{id}/profile",
        summary: "The last complete profile of its process.",
        query: &[BY, FORMAT, MIN_RATIO],
        answer: "ProfileView",
        refusals: &[404, 503],
    },
    Endpoint {
        path: "/debug/pprof/heap",
        summary: "A process's profile as gzipped pprof, for scrapers.",
        query: &[("pid", "integer", "Process id."), ("seconds", "integer", "Records for this time first, if profile.on_demand allows it.")],
        answer: "",
        refusals: &[403, 404, 409, 422],
    },
];

/// The paths of the document, and whether each needs the token.
pub fn paths() -> impl Iterator<Item = (&'static str, bool)> {
    ENDPOINTS.iter().map(|endpoint| (endpoint.path, is_guarded(endpoint.path)))
}

fn is_guarded(path: &str) -> bool {
    !matches!(path, "/metrics" | "/healthz" | "/readyz")
}

/// The schemas of what is sent, by name, as JSON Schema (draft 2020-12).
#[must_use]
pub fn schemas() -> Map<String, Value> {
    let mut generator =
        SchemaSettings::draft2020_12().with(|settings| settings.definitions_path = "/components/schemas".into()).into_generator();
    add::<AgentView>(&mut generator);
    add::<ProcessesView>(&mut generator);
    add::<ProcessView>(&mut generator);
    add::<Census>(&mut generator);
    add::<Leaks>(&mut generator);
    add::<Owners>(&mut generator);
    add::<Verdict>(&mut generator);
    add::<ExplainView>(&mut generator);
    add::<MapView>(&mut generator);
    add::<ProfileView>(&mut generator);
    add::<RangeView>(&mut generator);
    add::<HistoryView>(&mut generator);
    add::<PastProcesses>(&mut generator);
    add::<DiffView>(&mut generator);
    add::<EventsView>(&mut generator);
    add::<EventView>(&mut generator);
    generator.take_definitions(true)
}

fn add<T: JsonSchema>(generator: &mut SchemaGenerator) {
    generator.subschema_for::<T>();
}

/// The whole document.
#[must_use]
pub fn build() -> Value {
    let mut schemas = schemas();
    schemas.insert(
        "Error".into(),
        json!({ "type": "object", "required": ["error"], "properties": { "error": { "type": "string", "description": "What is wrong and what to do." } } }),
    );
    let paths: Map<String, Value> =
        ENDPOINTS.iter().map(|endpoint| (endpoint.path.to_owned(), json!({ "get": operation(endpoint) }))).collect();
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "fragprof agent",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "The memory of the processes of a machine. Names of numbers end in their unit; null = not known, which is not 0. Texts of processes are as the kernel reports them.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer", "description": "The token of server.token_file. Without one the agent answers only on loopback." } },
        },
    })
}

fn operation(endpoint: &Endpoint) -> Value {
    let parameter = |place: &str, &(name, kind, description): &Parameter| json!({ "name": name, "in": place, "required": place == "path", "description": description, "schema": { "type": kind } });
    let in_path = [PID, ID].into_iter().filter(|(name, ..)| endpoint.path.contains(&format!("{{{name}}}")));
    let mut parameters: Vec<Value> = in_path.map(|one| parameter("path", &one)).collect();
    parameters.extend(endpoint.query.iter().map(|one| parameter("query", one)));
    let content = match endpoint.answer {
        "" => json!({ "description": endpoint.summary }),
        name => {
            let schema = json!({ "$ref": format!("#/components/schemas/{name}") });
            json!({ "description": endpoint.summary, "content": { "application/json": { "schema": schema } } })
        }
    };
    let mut responses = Map::from_iter([("200".to_owned(), content)]);
    let guarded: &[u16] = if is_guarded(endpoint.path) { &[400, 401, 403] } else { &[] };
    for status in guarded.iter().chain(endpoint.refusals) {
        let schema = json!({ "$ref": "#/components/schemas/Error" });
        let refusal = json!({ "description": why(*status), "content": { "application/json": { "schema": schema } } });
        responses.insert(status.to_string(), refusal);
    }
    let mut operation = json!({ "summary": endpoint.summary, "parameters": parameters, "responses": responses });
    if is_guarded(endpoint.path)
        && let Some(operation) = operation.as_object_mut()
    {
        operation.insert("security".into(), json!([{ "token": [] }]));
    }
    operation
}

fn why(status: u16) -> &'static str {
    match status {
        400 => "A parameter is wrong.",
        401 => "The token is missing or wrong.",
        403 => "Not allowed here.",
        404 => "Not found.",
        409 => "Another recording is running.",
        422 => "Not possible with this process.",
        429 => "The budget is used up; Retry-After says when to retry.",
        _ => "The agent cannot answer now.",
    }
}

/// The document as text, as it is served and kept in `docs/api/openapi.json`.
#[must_use]
pub fn text() -> String {
    // Serialising texts, numbers and lists cannot fail.
    serde_json::to_string_pretty(&build()).unwrap_or_default() + "\n"
}

/// `/api/v1/openapi.json`
pub async fn document() -> Response {
    ([(axum::http::header::CONTENT_TYPE, "application/json")], text()).into_response()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// `FRAGPROF_BLESS=1 cargo test --lib openapi` regenerates the file.
    #[test]
    fn the_document_in_docs_is_the_one_that_is_served() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/api/openapi.json");
        if std::env::var_os("FRAGPROF_BLESS").is_some() {
            std::fs::write(path, text()).unwrap();
        }
        assert_eq!(std::fs::read_to_string(path).unwrap(), text(), "regenerate it: FRAGPROF_BLESS=1 cargo test --lib openapi");
    }

    #[test]
    fn every_schema_that_is_referred_to_is_there() {
        let text = text();
        let document = build();
        let schemas = document["components"]["schemas"].as_object().unwrap();
        for part in text.split("#/components/schemas/").skip(1) {
            let name = part.split('"').next().unwrap();
            assert!(schemas.contains_key(name), "{name}");
        }
    }
}
