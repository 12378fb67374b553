//! Detects dangers in Jupyter notebooks: each code cell is checked in the notebook's language; lines that begin with
//! `!`, and cells that begin with `%%bash` or `%%sh`, are checked as shell commands. Text cells and outputs are not
//! checked.

use serde_json::Value;

use super::{Danger, Lines, WorkLimit, grammar, json, shell};
use crate::checks::language::Language;

/// Returns the dangers in the code cells of a notebook.
pub(super) fn dangers(text: &str, work: &WorkLimit) -> Vec<Danger> {
    // A notebook that is not JSON cannot be opened, but its lines may still contain commands.
    let Ok(notebook) = serde_json::from_str::<Value>(text) else { return json::dangers(text, work) };
    let lines = Lines::new(text);
    let metadata = &notebook["metadata"];
    let language = [&metadata["language_info"]["name"], &metadata["kernelspec"]["language"]]
        .iter()
        .find_map(|name| Language::of_name(name.as_str()?))
        .unwrap_or(Language::Python);
    // Version 3 of the format has the cells in worksheets.
    let sheets = notebook["worksheets"].as_array().into_iter().flatten().map(|sheet| &sheet["cells"]);
    let cells = std::iter::once(&notebook["cells"]).chain(sheets).filter_map(Value::as_array).flatten();
    let mut found = Vec::new();
    for cell in cells.filter(|cell| cell["cell_type"] == "code") {
        let code = if cell["source"].is_null() { source(&cell["input"]) } else { source(&cell["source"]) };
        for (line, danger) in cell_dangers(&code, language, work) {
            // Locating a line searches the whole text.
            if !work.take(text.len()) {
                return found;
            }
            let encoded = Value::from(line).to_string();
            let row = text.find(encoded.trim_matches('"')).map_or(0, |offset| lines.row_of(offset));
            found.push(Danger { code: super::shown(line), ..danger }.at_row(row));
        }
    }
    found
}

/// Text of a cell: a string, or a list of lines.
fn source(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(lines) => lines.iter().filter_map(Value::as_str).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => String::new(),
    }
}

/// Dangers of a cell, each with its line.
fn cell_dangers<'c>(code: &'c str, language: Language, work: &WorkLimit) -> Vec<(&'c str, Danger)> {
    let lines = Lines::new(code);
    let shell_cell = ["%%bash", "%%sh", "%%script"].iter().any(|magic| code.trim_start().starts_with(magic));
    let command = |line: &'c str| match line.trim_start().strip_prefix('!') {
        Some(command) => Some(command),
        None => shell_cell.then_some(line),
    };
    let mut found = Vec::new();
    let mut program = String::new();
    for (row, line) in code.lines().enumerate() {
        let dangers = command(line).map(|command| shell::dangers(command, work)).unwrap_or_default();
        found.extend(dangers.into_iter().map(|(kind, code)| (line, Danger::new(kind, &lines, row, &code))));
        // Commands and magics are not part of the program; their lines stay, so that the rows do not change.
        program.push_str(if line.trim_start().starts_with(['!', '%']) { "" } else { line });
        program.push('\n');
    }
    if !shell_cell {
        let dangers = grammar::dangers(language, &program, work);
        found.extend(dangers.into_iter().map(|danger| (lines.line(danger.line as usize - 1), danger)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::DangerKind;
    use super::*;

    fn kinds(text: &str) -> Vec<(DangerKind, u32)> {
        dangers(text, &WorkLimit::default()).into_iter().map(|d| (d.kind, d.line)).collect()
    }

    #[test]
    fn code_cells_are_checked_and_text_is_not() {
        let cell = |kind: &str, lines: &str| {
            format!("{{\"cells\": [\n{{\"cell_type\": \"{kind}\", \"source\": [\n{lines}\n]}}]}}")
        };
        let eval = "\"x = 1\\n\",\n\"eval(x)\"";
        assert_eq!(kinds(&cell("code", eval)), [(DangerKind::DynamicCode, 4)]);
        assert_eq!(kinds(&cell("markdown", eval)), []);
        assert_eq!(kinds(&cell("code", "\"!rm -rf ~\\n\",\n\"x = 1\"")), [(DangerKind::DeletesFiles, 3)]);
        assert_eq!(kinds(&cell("code", "\"%%bash\\n\",\n\"rm -rf /\"")), [(DangerKind::DeletesFiles, 4)]);
        assert_eq!(kinds(&cell("code", "\"%matplotlib inline\\n\",\n\"print('rm -rf /')\"")), []);
        let javascript = "{\"metadata\": {\"kernelspec\": {\"language\": \"javascript\"}}, \"cells\": [{\"cell_type\": \
                          \"code\", \"source\": \"while (true) { x++ }\"}]}";
        assert_eq!(kinds(javascript), [(DangerKind::EndlessLoop, 1)]);
        let old = "{\"worksheets\": [{\"cells\": [{\"cell_type\": \"code\", \"input\": \"eval(x)\"}]}]}";
        assert_eq!(kinds(old), [(DangerKind::DynamicCode, 1)]);
    }
}
