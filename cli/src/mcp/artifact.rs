//! `get_artifact`: what the creator wrote in one iteration.

use super::access::Access;
use super::arguments::{GetArtifact, in_range};
use super::error::ToolError;
use super::replies::{ArtifactPart, ArtifactTexts};

const DEFAULT_PART_BYTES: usize = 30_000;
const PART_BYTES: (usize, usize) = (1_000, 200_000);

/// `get_artifact`.
pub async fn get(access: &Access, arguments: GetArtifact) -> Result<ArtifactPart, ToolError> {
    let max_bytes = in_range("max_bytes", arguments.max_bytes, PART_BYTES, DEFAULT_PART_BYTES)?;
    let client = access.client()?;
    let chain = client.artifacts(arguments.session_id.0, arguments.iteration).await?;
    let Some(artifact) = chain.artifacts.last() else {
        return Err(ToolError(format!("{} has no result yet; wait for it with get_progress_summary", chain.number)));
    };
    let (part, next_offset) = part(&artifact.diff, arguments.offset, max_bytes)?;
    Ok(ArtifactPart {
        task: chain.number.to_string(),
        artifact_id: artifact.id.to_string(),
        iteration: artifact.iteration,
        base: chain.base.clone(),
        commit: artifact.commit.clone(),
        diff_bytes: artifact.diff.len(),
        next_offset,
        untrusted_content: ArtifactTexts {
            model: artifact.model.clone(),
            paths: artifact.files.iter().map(|file| file.path.clone()).collect(),
            diff: part.to_owned(),
        },
    })
}

/// At most `max_bytes` of the text from `offset`, and the offset after it. A part ends with a whole line if it can, and
/// always with a whole character.
fn part(text: &str, offset: usize, max_bytes: usize) -> Result<(&str, Option<usize>), ToolError> {
    let Some(rest) = text.get(offset..) else {
        let message = format!("{offset} is not a next_offset of this diff, which has {} bytes", text.len());
        return Err(ToolError::argument("offset", message));
    };
    if rest.len() <= max_bytes {
        return Ok((rest, None));
    }
    let end = (0..=max_bytes).rev().find(|end| rest.is_char_boundary(*end)).unwrap_or(0);
    let end = rest[..end].rfind('\n').map_or(end, |line_end| line_end + 1);
    Ok((&rest[..end], Some(offset + end)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_diff_add_up_to_it() {
        for (text, max) in [("ab\ncd\nefgh\n", 5), ("ähnlich ößä", 3), ("one line without an end", 4), ("", 9)] {
            let (mut whole, mut offset) = (String::new(), Some(0));
            while let Some(at) = offset {
                let (piece, next) = part(text, at, max).unwrap();
                assert!(piece.len() <= max && (next.is_none() || !piece.is_empty()), "{piece:?} of {text:?}");
                whole.push_str(piece);
                offset = next;
            }
            assert_eq!(whole, text);
        }
        assert_eq!(part("ab\ncd\n", 0, 5).unwrap(), ("ab\n", Some(3)));
        let error = part("ä", 1, 9).unwrap_err().0;
        assert_eq!(error, "offset: 1 is not a next_offset of this diff, which has 2 bytes");
    }
}
