package rendezvous

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// pollTime is how often a rank looks for the address of rank 0, retryTime how
	// often it tries one again that did not answer.
	pollTime  = 5 * time.Millisecond
	retryTime = 100 * time.Millisecond
	// maxNote bounds the file that ranks of one machine meet by, in bytes.
	maxNote  = 1024
	noteHead = "euryale meeting 2"
	// keyBytes is how much of a digest names a meeting; in hexadecimal.
	keyBytes = 12
	lockName = ".lock"
	newName  = ".new"
	// sweepTime is far longer than any rank holds the lock to clean up.
	sweepTime = 250 * time.Millisecond
)

// meeting is where the ranks of one job on one machine find each other: a file
// in a directory of the user, which rank 0 writes and the others wait for.
//
//	DIR/KEY       the address of rank 0's store, and the token unless all have it;
//	              or the failure after which rank 0 is not there any more
//	DIR/KEY.lock  locked while the ranks meet by the one who wrote the other
type meeting struct {
	path string
	lock *os.File // nil on ranks that look for rank 0
}

// note is the content of the file. Of addr and ended one is empty.
type note struct{ addr, token, ended string }

func (n note) encode() string {
	return strings.Join([]string{noteHead, n.addr, n.token, n.ended, ""}, "\n")
}

func decodeNote(text string) (note, bool) {
	lines := strings.Split(text, "\n")
	if len(lines) != 5 || lines[0] != noteHead || (lines[1] == "") == (lines[3] == "") || lines[4] != "" {
		return note{}, false
	}
	return note{addr: lines[1], token: lines[2], ended: lines[3]}, true
}

// newMeeting returns the meeting of a job.
func newMeeting(e Env) (*meeting, error) {
	dir, err := meetingDir()
	if err != nil {
		return nil, err
	}
	key := sha256.Sum256(fmt.Appendf(nil, "%q %q %q %d %d", e.Launcher, e.Job, e.Addr, e.Port, os.Getuid()))
	return &meeting{path: filepath.Join(dir, fmt.Sprintf("%x", key[:keyBytes]))}, nil
}

// meetingDirs returns where the directory can be, best first.
func meetingDirs() []string {
	dirs := []string{filepath.Join(os.TempDir(), fmt.Sprintf("euryale-%d", os.Getuid()))}
	// su and sudo can leave the runtime directory of another user behind.
	if run := os.Getenv("XDG_RUNTIME_DIR"); run != "" && checkOwner(run) == nil {
		dirs = append([]string{filepath.Join(run, "euryale")}, dirs...)
	}
	return dirs
}

// awaitMeetings waits until a rank has made the directory: who only has news for
// ranks need not.
func awaitMeetings(ctx context.Context) error {
	for ; ctx.Err() == nil; pause(ctx, pollTime) {
		if slices.ContainsFunc(meetingDirs(), func(dir string) bool { _, err := os.Lstat(dir); return err == nil }) {
			return nil
		}
	}
	return context.Cause(ctx)
}

// meetingDir returns the directory, which it makes if need be: the first one that
// nobody else can write.
func meetingDir() (string, error) {
	var problem error
	for _, dir := range meetingDirs() {
		err := makePrivate(dir)
		if err == nil {
			return dir, nil
		}
		if problem != nil {
			err = fmt.Errorf("%w; %w", problem, err)
		}
		problem = err
	}
	return "", fmt.Errorf("make the directory where ranks meet: %w: set TMPDIR to a directory of user %d on all ranks", problem, os.Getuid())
}

// makePrivate makes a directory of mode 0700, or makes sure that it is one.
func makePrivate(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if !info.IsDir() || info.Mode().Perm() != 0o700 {
		return fmt.Errorf("%s is %v, and must be a directory (no link) with mode 0700", dir, info.Mode())
	}
	return checkOwner(dir)
}

// checkOwner returns an error that names the owner of a file if it is another
// user.
func checkOwner(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("%s: its owner cannot be found out", path)
	}
	if int(owner.Uid) != os.Getuid() {
		return fmt.Errorf("%s belongs to user %d, not to user %d", path, owner.Uid, os.Getuid())
	}
	return nil
}

// publish puts up the note of rank 0, until end.
func (m *meeting) publish(ctx context.Context, n note) error {
	sweep(filepath.Dir(m.path))
	lock, err := lockFile(m.path + lockName)
	for end := time.Now().Add(sweepTime); errors.Is(err, unix.EWOULDBLOCK) && time.Now().Before(end) && ctx.Err() == nil; {
		pause(ctx, pollTime) // it may be another rank that sweeps
		lock, err = lockFile(m.path + lockName)
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("another job with the same name is starting (it holds %s): give every job a name of its own in EURYALE_JOB, and see that only one process has RANK=0", m.path+lockName)
	}
	if err != nil {
		return fmt.Errorf("lock the place where ranks meet: %w", err)
	}
	m.lock = lock
	if err := m.write(n); err != nil {
		m.end()
		return fmt.Errorf("publish the address of rank 0: %w", err)
	}
	return nil
}

// write puts the note in place, so that it is never seen half written.
func (m *meeting) write(n note) error {
	f, err := os.OpenFile(m.path+newName, os.O_CREATE|os.O_WRONLY|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(n.encode())
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), m.path)
}

// end takes the note down. Only the first call does.
func (m *meeting) end() {
	if m.lock == nil {
		return
	}
	for _, name := range []string{"", newName, lockName} {
		os.Remove(m.path + name)
	}
	m.lock.Close()
	m.lock = nil
}

// lockFile makes and locks a file. The lock ends with the process.
func lockFile(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			f.Close()
			return nil, err
		}
		if same(f, path) {
			return f, nil
		}
		f.Close() // it was removed before we had the lock: make a new one
	}
}

func same(f *os.File, path string) bool {
	mine, err1 := f.Stat()
	there, err2 := os.Lstat(path)
	return err1 == nil && err2 == nil && os.SameFile(mine, there)
}

// sweep removes what processes that were killed while meeting left behind.
func sweep(dir string) {
	files, _ := filepath.Glob(filepath.Join(dir, "*"))
	for _, path := range files {
		path = strings.TrimSuffix(strings.TrimSuffix(path, lockName), newName)
		if len(filepath.Base(path)) != 2*keyBytes {
			continue // it is not ours
		}
		if lock, err := lockFile(path + lockName); err == nil {
			(&meeting{path: path, lock: lock}).end()
		}
	}
}

// clear removes what rank 0 left behind, if it was killed. The lock of a killed
// process may outlive its connections a little.
func (m *meeting) clear() {
	for end := time.Now().Add(sweepTime); time.Now().Before(end); pause(context.Background(), pollTime) {
		sweep(filepath.Dir(m.path))
		if _, err := os.Lstat(m.path + lockName); errors.Is(err, os.ErrNotExist) {
			return
		}
	}
}

// read returns the note that is up now, if any.
func (m *meeting) read() (note, bool) {
	f, err := os.OpenFile(m.path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return note{}, false
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxNote))
	if err != nil {
		return note{}, false
	}
	return decodeNote(string(text))
}

// find waits for rank 0 and connects to it. A note that leads nowhere, or to
// another job, is one left behind: find waits for the next. It returns the failure
// that another one tells.
func (m *meeting) find(ctx context.Context, e Env, me identity) (*client, error) {
	var last error
	wait := handshakeTime
	for {
		n, ok := m.read()
		if ok && n.ended != "" {
			return nil, decodeFailure([]byte(n.ended))
		}
		if ok {
			token := e.Token
			if token == "" {
				token = n.token
			}
			c, err := dial(ctx, n.addr, token, me, wait, e.Timeout)
			if err == nil || lasting(err) {
				return c, err
			}
			last = telling(ctx, last, err)
			m.awaitChange(ctx, n)
			wait = min(2*wait, e.Timeout)
		} else {
			pause(ctx, pollTime)
		}
		if ctx.Err() != nil {
			return nil, notFound(ctx, last)
		}
	}
}

// awaitChange waits until the note is not n, or it is time to try n again.
func (m *meeting) awaitChange(ctx context.Context, n note) {
	for end := time.Now().Add(retryTime); time.Now().Before(end) && ctx.Err() == nil; {
		if now, ok := m.read(); !ok || now != n {
			return
		}
		pause(ctx, pollTime)
	}
}

// notFound is the error of a rank that did not find rank 0.
func notFound(ctx context.Context, last error) error {
	if last == nil {
		last = errors.New("its address was not published")
	}
	return fmt.Errorf("rank 0 is missing (%w; last attempt: %w): look at its output, and see that all ranks are of one job", context.Cause(ctx), last)
}
