package rendezvous

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/internal/filelock"
)

const (
	// pollTime is how often a rank looks for the address of rank 0, retryTime how often it retries
	// one that did not answer.
	pollTime  = 5 * time.Millisecond
	retryTime = 100 * time.Millisecond
	// maxRecord bounds the join record, in bytes.
	maxRecord  = 1024
	recordHead = "euryale meeting 2"
	// keyBytes is how many bytes of a digest name a join record, in hexadecimal.
	keyBytes = 12
	lockName = ".lock"
	newName  = ".new"
	// expireTime is far longer than any rank holds a lock to clean up.
	expireTime = 250 * time.Millisecond
)

// joinRecord is the file through which the ranks of one job on one machine find each other. Rank 0
// writes it, in a directory of the user, and the others wait for it.
//
//	DIR/KEY       the address of rank 0's store, and the token unless all ranks were
//	              given one; or the failure that ended rank 0
//	DIR/KEY.lock  locked by the writer of the record until all ranks have joined
type joinRecord struct {
	path string
	lock *os.File // nil on ranks that look for rank 0
}

// recordValue is the content of the file. Either addr or ended is empty.
type recordValue struct{ addr, token, ended string }

func (v recordValue) encode() string {
	return strings.Join([]string{recordHead, v.addr, v.token, v.ended, ""}, "\n")
}

func decodeRecord(text string) (recordValue, bool) {
	lines := strings.Split(text, "\n")
	if len(lines) != 5 || lines[0] != recordHead || (lines[1] == "") == (lines[3] == "") ||
		lines[4] != "" {
		return recordValue{}, false
	}
	return recordValue{addr: lines[1], token: lines[2], ended: lines[3]}, true
}

// newJoinRecord returns the join record of a job.
func newJoinRecord(e Env) (*joinRecord, error) {
	dir, err := recordDir()
	if err != nil {
		return nil, err
	}
	key := sha256.Sum256(fmt.Appendf(nil, "%q %q %q %d %d", e.Launcher, e.Job, e.Addr, e.Port,
		os.Getuid()))
	return &joinRecord{path: filepath.Join(dir, fmt.Sprintf("%x", key[:keyBytes]))}, nil
}

// recordDirs returns the candidates for the directory of join records, best first.
func recordDirs() []string {
	dirs := []string{filepath.Join(os.TempDir(), fmt.Sprintf("euryale-%d", os.Getuid()))}
	// su and sudo can leave the runtime directory of another user behind.
	if run := os.Getenv("XDG_RUNTIME_DIR"); run != "" && checkOwner(run) == nil {
		dirs = append([]string{filepath.Join(run, "euryale")}, dirs...)
	}
	if cache := cacheRecords(); cache != "" {
		dirs = append(dirs, cache)
	}
	return dirs
}

// cacheRecords returns the directory of join records in the user's cache, "" if the user has none.
// Other users cannot put one there first, as they can in /tmp. Machines may share the cache, so the
// directory's name depends on this machine.
func cacheRecords() string {
	cache, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	name := sha256.Sum256([]byte(machine()))
	return filepath.Join(cache, "euryale", fmt.Sprintf("join-%.6x", name))
}

// awaitRecordDir waits until a rank has made the directory. A launcher that only
// reports an end does not make it.
func awaitRecordDir(ctx context.Context) error {
	for ; ctx.Err() == nil; pause(ctx, pollTime) {
		if recordDirMade() {
			return nil
		}
	}
	return context.Cause(ctx)
}

// recordDirMade reports whether recordDir finds a directory already made.
func recordDirMade() bool {
	for _, dir := range recordDirs() {
		if _, err := os.Lstat(dir); err != nil {
			return false
		}
		if makePrivate(dir) == nil {
			return true
		}
	}
	return false
}

// recordDir returns the first directory that only this user can write. It makes
// the directory if necessary.
func recordDir() (string, error) {
	var problem error
	for _, dir := range recordDirs() {
		if dir == cacheRecords() {
			os.MkdirAll(filepath.Dir(dir), 0o700) // makePrivate reports the error
		}
		err := makePrivate(dir)
		if err == nil {
			return dir, nil
		}
		if problem != nil {
			err = fmt.Errorf("%w; %w", problem, err)
		}
		problem = err
	}
	return "", fmt.Errorf("make the directory for join records: %w: set TMPDIR to a directory "+
		"that user %d owns, on all ranks", problem, os.Getuid())
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
	if !info.IsDir() || !isPrivate(info) {
		return fmt.Errorf("%s is %v, and must be a directory (no link) with mode 0700", dir,
			info.Mode())
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
	if owner := ownerOf(info); owner != os.Getuid() {
		return fmt.Errorf("%s belongs to user %d, not to user %d", path, owner, os.Getuid())
	}
	return nil
}

// publish writes the record of rank 0, until end removes it.
func (m *joinRecord) publish(ctx context.Context, v recordValue) error {
	expire(filepath.Dir(m.path))
	lock, err := lockFile(m.path + lockName)
	for end := time.Now().Add(expireTime); errors.Is(err, filelock.ErrHeld) &&
		time.Now().Before(end) && ctx.Err() == nil; {
		pause(ctx, pollTime) // another rank may be expiring records
		lock, err = lockFile(m.path + lockName)
	}
	if errors.Is(err, filelock.ErrHeld) {
		return fmt.Errorf("another job with the same name is starting (it holds %s): give every "+
			"job its own name in EURYALE_JOB, and see that only one process has RANK=0",
			m.path+lockName)
	}
	if err != nil {
		return fmt.Errorf("lock the join record: %w", err)
	}
	m.lock = lock
	if err := m.write(v); err != nil {
		m.removeRecord()
		return fmt.Errorf("publish the address of rank 0: %w", err)
	}
	return nil
}

// write replaces the record atomically.
func (m *joinRecord) write(v recordValue) error {
	const flags = os.O_CREATE | os.O_WRONLY | os.O_TRUNC | filelock.NoFollow
	f, err := os.OpenFile(m.path+newName, flags, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(v.encode())
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return replace(f.Name(), m.path)
}

// removeRecord removes the record. Later calls do nothing.
func (m *joinRecord) removeRecord() {
	if m.lock == nil {
		return
	}
	filelock.Remove(m.lock, func() error {
		for _, name := range []string{"", newName, lockName} {
			os.Remove(m.path + name)
		}
		return nil
	})
	m.lock = nil
}

// lockFile makes and locks a file. The lock ends with the process.
func lockFile(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|filelock.NoFollow, 0o600)
		if err != nil {
			return nil, err
		}
		if err := filelock.TryLock(f); err != nil {
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

// expire removes the records of processes that were killed while joining.
func expire(dir string) {
	files, _ := filepath.Glob(filepath.Join(dir, "*"))
	for _, path := range files {
		path = strings.TrimSuffix(strings.TrimSuffix(path, lockName), newName)
		if len(filepath.Base(path)) != 2*keyBytes {
			continue // it is not ours
		}
		if lock, err := lockFile(path + lockName); err == nil {
			(&joinRecord{path: path, lock: lock}).removeRecord()
		}
	}
}

// clear removes the record of a rank 0 that was killed. The lock of a killed process
// may outlive its connections a little.
func (m *joinRecord) clear() {
	for end := time.Now().Add(expireTime); time.Now().Before(end); pause(context.Background(),
		pollTime) {
		expire(filepath.Dir(m.path))
		if _, err := os.Lstat(m.path + lockName); errors.Is(err, os.ErrNotExist) {
			return
		}
	}
}

// read returns the current record, if any.
func (m *joinRecord) read() (recordValue, bool) {
	f, err := os.OpenFile(m.path, os.O_RDONLY|filelock.NoFollow, 0)
	if err != nil {
		return recordValue{}, false
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxRecord))
	if err != nil {
		return recordValue{}, false
	}
	return decodeRecord(string(text))
}

// findServer connects to rank 0's store, once it is where read says. A record that leads nowhere,
// or to another job, is stale: findServer waits for the next. If the record holds a failure, it
// returns that. If another program listens there, it keeps trying and reports that after the
// timeout.
func findServer(ctx context.Context, e Env, me identity, read func() (recordValue, bool),
	where func() string) (*client, error) {
	t := tries{wait: handshakeTime}
	for ctx.Err() == nil {
		v, ok := read()
		switch {
		case v.ended != "":
			return nil, decodeFailure([]byte(v.ended))
		case ok:
			c, err := dial(ctx, v.addr, cmp.Or(e.Token, v.token), me, t.wait, e.Timeout)
			if err == nil || !t.failed(err, e.Timeout, ctx.Err() != nil) {
				return c, err
			}
			awaitChange(ctx, read, v)
		default:
			pause(ctx, pollTime)
		}
	}
	if t.last == nil {
		t.last = fmt.Errorf("its address has not appeared in %s", where())
	}
	return nil, notFound(context.Cause(ctx), t.last)
}

// tries are a rank's attempts to reach rank 0. Each may take twice as long as the one before.
type tries struct {
	wait time.Duration // for the next one
	last error         // what is said if all fail
}

// failed hears that one has failed, and reports whether another one may help.
func (t *tries) failed(err error, most time.Duration, over bool) bool {
	t.last = telling(over, t.last, err)
	t.wait = min(2*t.wait, most)
	return !lasting(err)
}

// awaitChange waits until the record differs from v, or it is time to try v again.
func awaitChange(ctx context.Context, read func() (recordValue, bool), v recordValue) {
	for end := time.Now().Add(retryTime); time.Now().Before(end) && ctx.Err() == nil; {
		if now, ok := read(); !ok || now != v {
			return
		}
		pause(ctx, pollTime)
	}
}

// where names the directory of the record, and the variables that determine it.
func (m *joinRecord) where() string {
	return fmt.Sprintf("%s: that follows from XDG_RUNTIME_DIR=%q and TMPDIR=%q here, which must "+
		"be the same on all ranks of a machine",
		filepath.Dir(m.path), os.Getenv("XDG_RUNTIME_DIR"), os.Getenv("TMPDIR"))
}

// notFound is the error of a rank that did not find rank 0.
func notFound(cause, last error) error {
	return fmt.Errorf("rank 0 is missing (%w; last attempt: %w): check its output, and "+
		"that all ranks belong to one job", cause, last)
}
