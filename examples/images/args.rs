//! The command line.

use std::path::{Path, PathBuf};

const HELP: &str = "\
Resizes every photo of a folder to three widths, each copy one job.

usage: cargo run --example images -- [DIR] [OPTIONS]

  DIR              the folder with the photos; without it, the sample photos
  --database URL   sqlite:FILE, or postgres:// or mysql://USER:PASSWORD@HOST/DATABASE; by default the
                   environment variable JOBQ_DATABASE_URL, or else target/images/jobs.db
  --out DIR        where the copies go; by default target/images/NAME-OF-THE-FOLDER
  --retry          make dead letters pending again, for instance when what failed is mended
  --help           show this

For a large folder build with optimisation: cargo run --release --example images -- DIR";

/// What is asked for.
pub(crate) struct Args {
    pub(crate) folder: PathBuf,
    pub(crate) out: PathBuf,
    pub(crate) database: String,
    pub(crate) retry: bool,
}

impl Args {
    /// Reads the command line; `None` when it only asked for help, which is shown.
    ///
    /// # Errors
    ///
    /// What is wrong, fit to be shown.
    pub(crate) fn parse() -> Result<Option<Self>, String> {
        let (mut folder, mut out, mut database, mut retry) = (None, None, None, false);
        let mut args = std::env::args_os().skip(1);
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or(format!("{} needs a value", arg.display()));
            match arg.to_str() {
                Some("--help" | "-h") => {
                    println!("{HELP}");
                    return Ok(None);
                }
                Some("--retry") => retry = true,
                Some("--out") => out = Some(PathBuf::from(value()?)),
                Some("--database") => {
                    let url = value()?.into_string();
                    database = Some(url.map_err(|_| "the URL of --database is not UTF-8")?);
                }
                Some(option) if option.starts_with('-') => {
                    return Err(format!("there is no option {option}; see --help"));
                }
                _ if folder.is_some() => return Err("more than one folder; see --help".to_owned()),
                _ => folder = Some(PathBuf::from(arg)),
            }
        }

        let project = Path::new(env!("CARGO_MANIFEST_DIR"));
        let home = project.join("target/images");
        let folder = folder.unwrap_or_else(|| project.join("examples/photos"));
        // Jobs are run from anywhere, so they name files by their whole path.
        let folder = folder
            .canonicalize()
            .map_err(|error| format!("cannot read the folder {}: {error}", folder.display()))?;
        let out = out.unwrap_or_else(|| home.join(folder.file_name().unwrap_or_default()));
        let made = std::fs::create_dir_all(&out).and_then(|()| std::fs::create_dir_all(&home));
        let out = made
            .and_then(|()| out.canonicalize())
            .map_err(|error| format!("cannot make the folder {}: {error}", out.display()))?;
        let database = database
            .or_else(|| std::env::var("JOBQ_DATABASE_URL").ok())
            .unwrap_or_else(|| format!("sqlite:{}", home.join("jobs.db").display()));
        Ok(Some(Self { folder, out, database, retry }))
    }

    /// Where the jobs are, without a password.
    pub(crate) fn database_name(&self) -> &str {
        let (database, _options) = self.database.split_once('?').unwrap_or((&self.database, ""));
        database.rsplit('@').next().unwrap_or_default()
    }
}
