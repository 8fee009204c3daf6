//! A server of one test's own, to be stopped and started, and a wire to be cut.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sqlx::{Connection, MySqlConnection};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::bed::unique;

/// A server in a scratch folder, with the settings that it has by default; stopped when dropped.
pub(crate) struct Server {
    programs: Programs,
    /// Whom it runs as, where it does not accept us.
    user: Option<String>,
    folder: tempfile::TempDir,
    port: u16,
    /// MySQL and MariaDB while they are up; PostgreSQL detaches itself.
    running: Option<Child>,
}

enum Programs {
    /// The folder of `initdb` and `pg_ctl`.
    Postgres(PathBuf),
    /// The folder of `init` and `serve`, and settings for the latter; see scripts/mysql.
    Mysql(PathBuf, Vec<&'static str>),
}

/// How a server is stopped.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Down {
    /// It closes its connections and its files.
    Clean,
    /// As when the plug is pulled: what it has promised to keep, it must have kept already.
    Crash,
}

impl Server {
    pub(crate) async fn postgres() -> Self {
        let bin = folder_of("PostgreSQL", "JOBQ_TEST_PG_BIN", "initdb and pg_ctl");
        let server = Self::new(Programs::Postgres(bin.clone()), "JOBQ_TEST_PG_USER");
        let mut initdb = server.program(bin.join("initdb"));
        initdb.args(["-U", "postgres", "-A", "trust", "--no-sync", "--locale=C", "-E", "UTF8"]);
        run(initdb.arg("-D").arg(server.data()));
        server.started().await
    }

    pub(crate) async fn mysql() -> Self {
        Self::mysql_with(&[]).await
    }

    /// A MySQL server with some settings.
    pub(crate) async fn mysql_with(settings: &[&'static str]) -> Self {
        let bin = folder_of("MySQL", "JOBQ_TEST_MYSQL_BIN", "init and serve");
        Self::mysql_of(bin, settings).await
    }

    pub(crate) async fn mariadb() -> Self {
        Self::mariadb_with(&[]).await
    }

    /// A MariaDB server with some settings.
    pub(crate) async fn mariadb_with(settings: &[&'static str]) -> Self {
        let bin = folder_of("MariaDB", "JOBQ_TEST_MARIADB_BIN", "init and serve");
        Self::mysql_of(bin, settings).await
    }

    /// A MariaDB 10.5, where one could be had.
    pub(crate) async fn mariadb105() -> Option<Self> {
        let bin = std::env::var("JOBQ_TEST_MARIADB105_BIN").ok()?;
        Some(Self::mysql_of(bin.into(), &[]).await)
    }

    async fn mysql_of(bin: PathBuf, settings: &[&'static str]) -> Self {
        let programs = Programs::Mysql(bin.clone(), settings.to_vec());
        let server = Self::new(programs, "JOBQ_TEST_MYSQL_USER");
        run(server.program(bin.join("init")).arg(server.folder.path()));
        server.started().await
    }

    fn new(programs: Programs, user: &str) -> Self {
        let user = std::env::var(user).ok().filter(|user| !user.is_empty());
        let folder = tempfile::tempdir().expect("a temporary folder");
        if let Some(user) = &user {
            run(Command::new("chown").arg(user).arg(folder.path()));
        }
        Self { programs, user, folder, port: free_port(), running: None }
    }

    async fn started(mut self) -> Self {
        self.up().await;
        self
    }

    pub(crate) fn url(&self) -> String {
        match &self.programs {
            Programs::Postgres(_) => {
                format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
            }
            Programs::Mysql(..) => format!("mysql://jobq:jobq@127.0.0.1:{}/jobq", self.port),
        }
    }

    /// Starts the server and waits until it answers.
    pub(crate) async fn up(&mut self) {
        match &self.programs {
            Programs::Postgres(_) => {
                let options = format!(
                    "-p {} -c listen_addresses=127.0.0.1 -c unix_socket_directories= \
                     -c max_connections=100",
                    self.port
                );
                let mut start = self.pg_ctl();
                start.args(["-w", "-t", "60", "-o", &options, "-l"]).arg(self.log()).arg("start");
                run(&mut start);
            }
            Programs::Mysql(bin, settings) => {
                let mut serve = self.program("setpriv");
                // It must not outlive us, even if we are killed.
                serve.args(["--pdeathsig", "KILL", "--"]).arg(bin.join("serve"));
                serve.arg(self.folder.path()).arg(self.port.to_string()).args(settings);
                let log = std::fs::File::create(self.log()).expect("a log file");
                serve.stdout(log.try_clone().expect("the log file can be shared")).stderr(log);
                self.running = Some(serve.spawn().expect("the program can be run"));
                self.until_it_answers().await;
            }
        }
    }

    async fn until_it_answers(&mut self) {
        let end = Instant::now() + Duration::from_secs(60);
        while let Err(error) = MySqlConnection::connect(&self.url()).await {
            let ended = self.running.as_mut().map(|server| server.try_wait().expect("its state"));
            let log = || std::fs::read_to_string(self.log());
            assert!(matches!(ended, Some(None)), "it does not start: {:?}", log());
            assert!(Instant::now() < end, "it does not answer: {error}: {:?}", log());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Stops the server and waits until it is gone.
    pub(crate) fn down(&mut self, how: Down) {
        match &self.programs {
            Programs::Postgres(_) => {
                let mode = match how {
                    Down::Clean => "fast",
                    Down::Crash => "immediate",
                };
                run(self.pg_ctl().args(["-w", "-m", mode, "stop"]));
            }
            Programs::Mysql(..) => {
                let mut server = self.running.take().expect("it is up");
                match how {
                    Down::Clean => {
                        run(Command::new("kill").args(["-TERM", &server.id().to_string()]));
                    }
                    Down::Crash => server.kill().expect("it can be killed"),
                }
                server.wait().expect("it ends");
            }
        }
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("server.log")
    }

    fn pg_ctl(&self) -> Command {
        let Programs::Postgres(bin) = &self.programs else { unreachable!("PostgreSQL only") };
        let mut command = self.program(bin.join("pg_ctl"));
        command.arg("-D").arg(self.data()).arg("-s");
        command
    }

    /// A program, run as a user that the server accepts.
    fn program(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = match &self.user {
            None => Command::new(program),
            Some(user) => {
                let mut command = Command::new("setpriv");
                command.args(["--reuid", user, "--regid"]).arg(group_of(user)).arg("--init-groups");
                command.arg("--").arg(program);
                command
            }
        };
        command.env("LC_ALL", "C").current_dir(self.folder.path());
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        match &self.programs {
            Programs::Postgres(_) => {
                let _ = self.pg_ctl().args(["-m", "immediate", "stop"]).status();
            }
            Programs::Mysql(..) => {
                if let Some(mut server) = self.running.take() {
                    let _ = server.kill();
                    let _ = server.wait();
                }
            }
        }
    }
}

fn folder_of(name: &str, variable: &str, programs: &str) -> PathBuf {
    let folder = std::env::var(variable).unwrap_or_else(|_| {
        panic!(
            "this test starts a {name} server of its own: run `scripts/test`, or set {variable} to \
             the folder of {programs}"
        )
    });
    folder.into()
}

/// A port below those that the kernel hands out to clients: while the server is down, the very
/// connection that tries to reach it might get such a one, and reach itself.
fn free_port() -> u16 {
    let mut guess = u64::from(std::process::id()) * 7 + unique();
    loop {
        let port = 20_000 + (guess % 12_000) as u16;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
        guess += 1;
    }
}

fn group_of(user: &str) -> String {
    let output = Command::new("id").args(["-gn", user]).output().expect("id can be run");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn run(command: &mut Command) {
    let output = command.stderr(Stdio::piped()).output().expect("the program can be run");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {error}");
}

/// A wire between a worker and its server.
pub(crate) struct Wire {
    port: u16,
    mode: watch::Sender<Mode>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Mode {
    /// Bytes pass.
    Whole,
    /// Connections stay open, but nothing passes, and new ones are accepted and never answered.
    BlackHole,
}

impl Wire {
    /// A wire to the server of a URL, and the URL that goes through it.
    pub(crate) async fn to(url: &str) -> (Self, String) {
        let (server, database) = url.rsplit_once('/').expect("the URL names a database");
        let (before, port) = server.rsplit_once(':').expect("the URL names its port");
        let wire = Self::to_port(port.parse().expect("a port")).await;
        let cut = format!("{before}:{}/{database}", wire.port);
        (wire, cut)
    }

    async fn to_port(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let own_port = listener.local_addr().expect("a bound port").port();
        let mode = watch::Sender::new(Mode::Whole);
        let modes = Arc::new(mode.subscribe());
        tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let mut mode = (*modes).clone();
                tokio::spawn(async move {
                    drop(mode.wait_for(|mode| *mode == Mode::Whole).await);
                    let Ok(mut far) = TcpStream::connect(("127.0.0.1", port)).await else { return };
                    tokio::select! {
                        _ = copy_bidirectional(&mut near, &mut far) => (),
                        () = async { drop(mode.wait_for(|mode| *mode == Mode::BlackHole).await) } => {
                            // Held open, both ends, for as long as the test runs.
                            std::future::pending::<()>().await;
                        }
                    }
                });
            }
        });
        Self { port: own_port, mode }
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }
}
