//! Which copies a folder of photos should have, and which of them are made.
//!
//! A copy carries the modification time of its photo, so that it is seen at once, without the
//! database, whether it is a copy of the photo as it is now.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::Deserialize;

/// What half-written copies are called.
pub(crate) const HALF_WRITTEN: &str = ".half-written-";

/// A copy to make: the payload of a `resize` job.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Deserialize)]
pub(crate) struct Copy {
    pub(crate) source: PathBuf,
    pub(crate) width: u32,
    pub(crate) target: PathBuf,
}

impl Copy {
    /// Reads a job's payload.
    pub(crate) fn of(payload: &str) -> Option<Self> {
        serde_json::from_str(payload).ok()
    }

    pub(crate) fn is_made(&self) -> bool {
        is_made(&self.source, &self.target)
    }

    /// The photo's name.
    pub(crate) fn name(&self) -> String {
        self.source.file_name().unwrap_or_default().display().to_string()
    }
}

/// The copies that the photos of a folder should have: `out/WIDTH/NAME` of each.
///
/// Every file counts as a photo, whatever its name: its job finds out. Hidden files do not, nor
/// does the README of the sample photos. Folders within the folder are left alone.
pub(crate) fn copies(folder: &Path, out: &Path, widths: &[u32]) -> io::Result<Vec<Copy>> {
    let mut copies = Vec::new();
    for entry in fs::read_dir(folder)? {
        let source = entry?.path();
        let name = source.file_name().unwrap_or_default();
        let hidden = name.as_encoded_bytes().starts_with(b".");
        if hidden || name == "README.md" || source.is_dir() {
            continue;
        }
        // A payload is JSON, and JSON is UTF-8.
        if source.to_str().is_none() {
            eprintln!("leaving out {}: its name is not UTF-8", source.display());
            continue;
        }
        copies.extend(widths.iter().map(|width| Copy {
            source: source.clone(),
            width: *width,
            target: out.join(width.to_string()).join(name),
        }));
    }
    copies.sort();
    Ok(copies)
}

/// Whether `target` is a copy of `source` as it is now.
pub(crate) fn is_made(source: &Path, target: &Path) -> bool {
    let (Some(source), Some(target)) = (modified(source), modified(target)) else { return false };
    let apart = source.duration_since(target).unwrap_or_else(|later| later.duration());
    // No file system keeps times more coarsely than this.
    apart <= Duration::from_secs(2)
}

/// When a file was last modified; `None` if it is not there.
pub(crate) fn modified(file: &Path) -> Option<SystemTime> {
    fs::metadata(file).and_then(|metadata| metadata.modified()).ok()
}

/// Deletes what a killed process left half written. To be called when nothing is being written.
pub(crate) fn clean(out: &Path) {
    let folders = fs::read_dir(out).into_iter().flatten().flatten();
    for file in folders.flat_map(|folder| fs::read_dir(folder.path())).flatten().flatten() {
        if file.file_name().as_encoded_bytes().starts_with(HALF_WRITTEN.as_bytes()) {
            // If it cannot be deleted, it does no harm.
            drop(fs::remove_file(file.path()));
        }
    }
}
