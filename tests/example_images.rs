//! The README's first command, as a stranger would treat it: run, run again, killed in the middle.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use jobq::{Client, DeadFilter, DeathReason, JobId, JobState, Lookup};
use sqlx::{AssertSqlSafe, Connection, Executor, MySqlConnection, PgConnection};

use common::example;

mod common;

const WIDTHS: [u32; 3] = [100, 200, 400];

/// The broken files among the sample photos, and a part of what their dead letters say.
const BROKEN: [(&str, &str); 4] = [
    ("empty.jpg", "the file is empty"),
    ("huge.png", "too large: 100000 × 100000 pixels"),
    ("notes.jpg", "not an image"),
    ("truncated.jpg", "the file is damaged"),
];

mod samples_are_resized_and_broken_files_are_dead_letters {
    use super::{Bed, resizes_samples};

    #[tokio::test]
    async fn on_sqlite() {
        resizes_samples(&Bed::sqlite()).await;
    }

    #[tokio::test]
    async fn on_postgres() {
        Bed::on_server("JOBQ_TEST_POSTGRES_URL", async |bed| resizes_samples(bed).await).await;
    }

    #[tokio::test]
    async fn on_mysql() {
        Bed::on_server("JOBQ_TEST_MYSQL_URL", async |bed| resizes_samples(bed).await).await;
    }

    #[tokio::test]
    async fn on_mariadb() {
        Bed::on_server("JOBQ_TEST_MARIADB_URL", async |bed| resizes_samples(bed).await).await;
    }
}

/// It waits for a lease to end. tests/processes kills workers on every database.
mod a_killed_run_is_finished_by_the_next {
    use super::{Bed, survives_kill};

    #[tokio::test]
    async fn on_sqlite() {
        survives_kill(&Bed::sqlite()).await;
    }

    #[tokio::test]
    async fn on_postgres() {
        Bed::on_server("JOBQ_TEST_POSTGRES_URL", async |bed| survives_kill(bed).await).await;
    }
}

#[tokio::test]
async fn a_mended_file_is_tried_again() {
    let bed = Bed::sqlite();
    let folder = bed.folder.path().join("photos");
    std::fs::create_dir(&folder).unwrap();
    let (photo, samples) = (folder.join("photo.jpg"), samples());
    std::fs::copy(samples.join("truncated.jpg"), &photo).unwrap();
    let folder = folder.to_str().unwrap();
    succeeded(&bed.example(&[folder]));
    assert_eq!(bed.states().await, BTreeMap::from([(JobState::Dead.as_str(), 3)]));

    std::fs::copy(samples.join("boats.jpg"), &photo).unwrap();
    let text = succeeded(&bed.example(&[folder]));

    assert!(text.contains("3 copies made, 0 dead letters"), "{text}");
    bed.assert_made(&["photo.jpg".to_owned()]);
}

/// The samples take one run; a second one finds nothing to do and does nothing.
async fn resizes_samples(bed: &Bed) {
    let photos = sound_samples();
    assert!(photos.len() >= 8);
    let text = succeeded(&bed.example(&[]));
    bed.assert_made(&photos);
    for photo in &photos {
        assert!(text.contains(photo), "{photo} is not in the table:\n{text}");
    }

    let dead = bed.client().await.dead(&DeadFilter::all(), 1_000).await.unwrap();
    assert_eq!(dead.len(), BROKEN.len() * WIDTHS.len());
    for (file, error) in BROKEN {
        let letters = dead.iter().filter(|letter| letter.payload.contains(file));
        let letters: Vec<_> = letters.collect();
        assert_eq!(letters.len(), WIDTHS.len(), "{file}");
        for letter in letters {
            assert!(letter.error.contains(error), "{file}: {}", letter.error);
            assert_eq!((letter.reason, letter.attempt), (DeathReason::Discarded, 1), "{file}");
        }
        let line = text.lines().find(|line| line.contains(file) && line.contains(error));
        assert!(line.is_some(), "the error of {file} is not shown:\n{text}");
    }

    let before = bed.inodes();
    let states = bed.states().await;
    let text = succeeded(&bed.example(&[]));
    assert!(text.contains("nothing to do"), "{text}");
    assert_eq!((bed.inodes(), bed.states().await), (before, states));
}

/// `kill -9` in the middle of many photos: the next run does what is left, and only that.
async fn survives_kill(bed: &Bed) {
    const PHOTOS: usize = 20;
    let folder = bed.folder.path().join("photos");
    std::fs::create_dir(&folder).unwrap();
    let photos: Vec<String> = (0..PHOTOS).map(|number| format!("boats {number}.jpg")).collect();
    for photo in &photos {
        std::fs::copy(samples().join("boats.jpg"), folder.join(photo)).unwrap();
    }
    let folder = folder.to_str().unwrap();
    let jobs = PHOTOS * WIDTHS.len();

    let mut running = bed.start(&[folder]);
    let deadline = Instant::now() + Duration::from_secs(60);
    while bed.inodes().len() < 4 {
        assert!(Instant::now() < deadline, "no copies appear");
        assert!(running.try_wait().unwrap().is_none(), "it ended before it could be killed");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    running.kill().unwrap();
    running.wait().unwrap();
    let made = bed.inodes();
    assert!(made.len() < jobs, "it was done before it could be killed");

    let text = succeeded(&bed.example(&[folder]));

    assert!(text.contains("continuing: "), "{text}");
    bed.assert_made(&photos);
    let now = bed.inodes();
    assert_eq!(now.len(), jobs, "something else was left behind: {now:?}");
    // What was there has not been made again: a new copy would be another file.
    for (copy, inode) in &made {
        assert_eq!(now.get(copy), Some(inode), "{} was made twice", copy.display());
    }
    assert_eq!(bed.states().await, BTreeMap::from([(JobState::Completed.as_str(), jobs as u64)]));
    let (client, mut again) = (bed.client().await, 0);
    for id in 1..=jobs as i64 {
        let Lookup::Found(job) = client.job(JobId(id)).await.unwrap() else {
            panic!("job {id} is lost")
        };
        assert!(job.attempt <= 2, "job {id} took {} attempts", job.attempt);
        again += usize::from(job.attempt == 2);
    }
    // The killed process had a job on each core, and could have as many that had ended but were
    // not yet written down.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    assert!(again <= 2 * cores, "{again} jobs ran twice");
}

/// A folder and a database of its own for one test.
struct Bed {
    folder: tempfile::TempDir,
    url: String,
}

impl Bed {
    fn sqlite() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", folder.path().join("jobs.db").display());
        Self { folder, url }
    }

    /// Runs a case on a database of its own on the server of an environment variable, if it is set.
    async fn on_server(variable: &str, case: impl AsyncFnOnce(&Self)) {
        let Ok(admin) = std::env::var(variable) else {
            eprintln!("skipped: {variable} is not set; scripts/test sets it");
            return;
        };
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("jobq_images_{}_{number}", std::process::id());
        execute(&admin, format!("create database {name}")).await;
        let (server, options) = match admin.split_once('?') {
            Some((server, options)) => (server, format!("?{options}")),
            None => (&*admin, String::new()),
        };
        let (host, _) = server.rsplit_once('/').expect("a URL that names a database");
        let url = format!("{host}/{name}{options}");
        case(&Self { folder: tempfile::tempdir().unwrap(), url }).await;
        let force = if admin.starts_with("postgres") { " with (force)" } else { "" };
        execute(&admin, format!("drop database {name}{force}")).await;
    }

    async fn client(&self) -> Client {
        Client::connect(&self.url).await.unwrap()
    }

    /// How many jobs are in which state.
    async fn states(&self) -> BTreeMap<&'static str, u64> {
        let counts = self.client().await.counts().await.unwrap();
        let counts = counts.into_iter().filter(|count| count.count > 0);
        counts.map(|count| (count.state.as_str(), count.count)).collect()
    }

    fn out(&self) -> PathBuf {
        self.folder.path().join("out")
    }

    /// Runs the example to its end.
    fn example(&self, args: &[&str]) -> Output {
        self.start(args).wait_with_output().unwrap()
    }

    fn start(&self, args: &[&str]) -> Child {
        let mut command = Command::new(example("images"));
        command.args(["--database", &self.url, "--out"]).arg(self.out()).args(args);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    }

    /// Every file in the output folder but half-written ones, and which file it is.
    fn inodes(&self) -> BTreeMap<PathBuf, u64> {
        let folders = std::fs::read_dir(self.out()).into_iter().flatten().flatten();
        let files = folders.flat_map(|folder| std::fs::read_dir(folder.path())).flatten().flatten();
        let whole = files.filter(|file| !file.file_name().to_string_lossy().starts_with('.'));
        whole.map(|file| (file.path(), inode(&file.path()))).collect()
    }

    /// Checks that exactly the copies of these photos are there, and are images.
    fn assert_made(&self, photos: &[String]) {
        for width in WIDTHS {
            let folder = self.out().join(width.to_string());
            let names = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().file_name());
            let names: BTreeSet<String> = names.map(|name| name.into_string().unwrap()).collect();
            assert_eq!(names, photos.iter().cloned().collect());
            for photo in photos {
                let copy = image::open(folder.join(photo)).expect("a copy is a whole image");
                assert_eq!(copy.width(), width, "{photo}");
                assert!(copy.height() > 0);
            }
        }
    }
}

/// Runs a statement on a server.
async fn execute(url: &str, sql: String) {
    let sql = AssertSqlSafe(sql);
    if url.starts_with("postgres") {
        PgConnection::connect(url).await.unwrap().execute(sql).await.unwrap();
    } else {
        MySqlConnection::connect(url).await.unwrap().execute(sql).await.unwrap();
    }
}

/// What a successful run wrote.
fn succeeded(output: &Output) -> String {
    let [text, errors] =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
    text
}

fn samples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/photos")
}

/// The names of the sample photos that are not broken.
fn sound_samples() -> Vec<String> {
    let files = std::fs::read_dir(samples()).unwrap();
    let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
    let sound =
        |name: &String| name != "README.md" && BROKEN.iter().all(|(broken, _)| name != broken);
    names.filter(sound).collect()
}

#[cfg(unix)]
fn inode(file: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(file).unwrap())
}

/// Where files have no number, their length must do.
#[cfg(not(unix))]
fn inode(file: &Path) -> u64 {
    std::fs::metadata(file).unwrap().len()
}
