//! Resizes one photo.
//!
//! What cannot get better by trying again is an error made with [`jobq::discard`]: the job becomes
//! a dead letter at once. Any other error is retried.

use std::fs::{self, File};
use std::io::{self, Cursor, Write};
use std::path::{Path, PathBuf};

use image::codecs::jpeg::JpegEncoder;
use image::codecs::png::PngDecoder;
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, RgbImage};
use jobq::discard;
use serde::{Deserialize, Serialize};
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::options::DecoderOptions;

use crate::folder::HALF_WRITTEN;

/// Larger files are not read.
const MAX_FILE: u64 = 100_000_000;

/// Larger photos are not decoded. A file of a few bytes can claim to be any size.
const MAX_PIXELS: u64 = 60_000_000;

/// What a copy is like.
#[derive(Serialize, Deserialize)]
pub(crate) struct Facts {
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) bytes: u64,
}

/// Why a photo was not resized.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PhotoError {
    /// The file itself is the reason. By `?`, what `discard` makes ends up here.
    #[error(transparent)]
    Hopeless(#[from] jobq::Control),
    /// The disk is full, a network drive is away, …: it may work the next time.
    #[error("cannot {action} {}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

/// Writes a copy of `source`, at most `width` pixels wide and never larger than it, to `target`.
///
/// The copy appears whole or not at all. `attempt` is unlike that of any other call.
pub(crate) fn resize(
    source: &Path,
    target: &Path,
    width: u32,
    attempt: &str,
) -> Result<Facts, PhotoError> {
    let (bytes, metadata) = read(source)?;
    // Everything is in memory now: what fails from here on is not the disk's fault.
    let (photo, format) = decode(&bytes)?;
    let width = width.min(photo.width());
    let height = (u64::from(photo.height()) * u64::from(width) / u64::from(photo.width())).max(1);
    let copy = photo.thumbnail_exact(width, height as u32);
    let bytes =
        encode(&copy, format).map_err(|error| discard(format!("cannot be encoded: {error}")))?;
    let facts = Facts { width: copy.width(), height: copy.height(), bytes: bytes.len() as u64 };
    write(target, &bytes, metadata.modified().ok(), attempt).map_err(|source| PhotoError::Io {
        action: "write",
        path: target.to_owned(),
        source,
    })?;
    Ok(facts)
}

/// What a copy that is made already is like.
pub(crate) fn measure(copy: &Path) -> Result<Facts, PhotoError> {
    let failed = |source| PhotoError::Io { action: "read", path: copy.to_owned(), source };
    let bytes = fs::metadata(copy).map_err(failed)?.len();
    let (width, height) =
        image::image_dimensions(copy).map_err(|error| failed(io::Error::other(error)))?;
    Ok(Facts { width, height, bytes })
}

fn read(source: &Path) -> Result<(Vec<u8>, fs::Metadata), PhotoError> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => discard("the file does not exist").into(),
        io::ErrorKind::PermissionDenied => discard("the file may not be read").into(),
        _ => PhotoError::Io { action: "read", path: source.to_owned(), source: error },
    };
    let metadata = fs::metadata(source).map_err(failed)?;
    if !metadata.is_file() {
        Err(discard("not a regular file"))?;
    }
    if metadata.len() == 0 {
        Err(discard("the file is empty"))?;
    }
    if metadata.len() > MAX_FILE {
        let (size, max) = (metadata.len() / 1_000_000, MAX_FILE / 1_000_000);
        Err(discard(format!("the file is too large: {size} MB; the limit is {max} MB")))?;
    }
    let bytes = fs::read(source).map_err(failed)?;
    Ok((bytes, metadata))
}

fn decode(bytes: &[u8]) -> Result<(DynamicImage, ImageFormat), jobq::Control> {
    let damaged = |error: &dyn std::fmt::Display| {
        let error = error.to_string();
        let error = error.trim().trim_matches('"');
        discard(format!("the file is damaged: {error}"))
    };
    match image::guess_format(bytes) {
        Ok(ImageFormat::Jpeg) => {
            // The decoder of `image` paints what is missing grey and reports nothing. A copy of
            // half a photo must not pass for a copy: the same decoder, but strict.
            let options = DecoderOptions::default()
                .set_strict_mode(true)
                .set_max_width(usize::MAX)
                .set_max_height(usize::MAX);
            let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
            decoder.decode_headers().map_err(|error| damaged(&error))?;
            let (width, height) = decoder.dimensions().expect("the headers are read");
            let (width, height) = (width as u32, height as u32);
            refuse_huge(width, height)?;
            let orientation = decoder.exif().and_then(|exif| Orientation::from_exif_chunk(exif));
            let pixels = decoder.decode().map_err(|error| damaged(&error))?;
            let photo = RgbImage::from_raw(width, height, pixels)
                .ok_or_else(|| damaged(&"not in colours that can be read"))?;
            Ok((upright(photo.into(), orientation), ImageFormat::Jpeg))
        }
        Ok(ImageFormat::Png) => {
            let mut decoder =
                PngDecoder::new(Cursor::new(bytes)).map_err(|error| damaged(&error))?;
            let (width, height) = decoder.dimensions();
            refuse_huge(width, height)?;
            let orientation = decoder.orientation().ok();
            let photo = DynamicImage::from_decoder(decoder).map_err(|error| damaged(&error))?;
            Ok((upright(photo, orientation), ImageFormat::Png))
        }
        Ok(format) => {
            let format = format.extensions_str().first().unwrap_or(&"other");
            Err(discard(format!("a {format} file; this example reads JPEG and PNG")))
        }
        Err(_) => Err(discard("not an image")),
    }
}

fn refuse_huge(width: u32, height: u32) -> Result<(), jobq::Control> {
    if u64::from(width) * u64::from(height) <= MAX_PIXELS {
        return Ok(());
    }
    let max = MAX_PIXELS / 1_000_000;
    Err(discard(format!("too large: {width} × {height} pixels; the limit is {max} million")))
}

/// Cameras store how they were held; the copy will not say it, so it is turned.
fn upright(mut photo: DynamicImage, orientation: Option<Orientation>) -> DynamicImage {
    photo.apply_orientation(orientation.unwrap_or(Orientation::NoTransforms));
    photo
}

fn encode(copy: &DynamicImage, format: ImageFormat) -> image::ImageResult<Vec<u8>> {
    let mut bytes = Vec::new();
    match format {
        ImageFormat::Jpeg => {
            copy.write_with_encoder(JpegEncoder::new_with_quality(&mut bytes, 85))?;
        }
        _ => copy.write_to(&mut Cursor::new(&mut bytes), format)?,
    }
    Ok(bytes)
}

/// Writes a file beside `target`, then renames it: whoever looks sees all of it or nothing.
fn write(
    target: &Path,
    bytes: &[u8],
    modified: Option<std::time::SystemTime>,
    attempt: &str,
) -> io::Result<()> {
    let folder = target.parent().unwrap_or(Path::new(""));
    fs::create_dir_all(folder)?;
    let half_written = folder.join(format!("{HALF_WRITTEN}{}", attempt.replace(':', "-")));
    let mut file = File::create(&half_written)?;
    file.write_all(bytes)?;
    if let Some(modified) = modified {
        file.set_modified(modified)?;
    }
    // jobq will be told that the copy is there: then it has to outlive a power cut as well.
    file.sync_all()?;
    fs::rename(&half_written, target)
}
