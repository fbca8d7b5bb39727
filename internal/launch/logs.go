package launch

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// Logs are only ever created, never opened. In a directory such as one in /tmp, other users may
// have put links in their place, and an earlier job's logs must be neither overwritten nor mixed
// with new ones. So files are created with O_EXCL, which does not follow links either, and an
// os.Root keeps links of directories from leading elsewhere.

// checkLogs returns an error if Job.LogDir already holds logs. Otherwise they would only be found
// when an attempt begins, after the build or in a restart.
func (j Job) checkLogs() error {
	if j.LogDir == "" {
		return nil
	}
	name := "attempt_*"
	if j.Machines != nil { // another machine's launcher may have made the directory
		name = filepath.Join(attemptDir(0), logName(j.first()))
	}
	found, err := fs.Glob(os.DirFS(j.LogDir), name)
	if err != nil || len(found) == 0 {
		return err
	}
	return earlierLogs(j.LogDir, found[0], fs.ErrExist)
}

func earlierLogs(dir, name string, err error) error {
	return fmt.Errorf("directory %s has %s, the logs of an earlier job (%w): "+
		"name another directory, or remove them", dir, name, err)
}

func attemptDir(attempt int) string { return fmt.Sprintf("attempt_%d", attempt) }

func logName(rank int) string { return fmt.Sprintf("rank_%d.log", rank) }

// logs are the log files of an attempt, first the launcher's, then one for each rank; nil without
// Job.LogDir.
type logs struct {
	dir   *os.Root
	files []*os.File
}

// openLogs makes the directory of an attempt's logs, and the launcher's log.
func (j Job) openLogs(attempt int) (*logs, error) {
	if j.LogDir == "" {
		return nil, nil
	}
	dir, err := j.makeLogDir(attempt)
	if err != nil {
		return nil, err
	}
	l := &logs{dir: dir}
	machine := 0
	if j.Machines != nil {
		machine = j.Machines.Number
	}
	if _, err := l.make(fmt.Sprintf("launcher_%d.log", machine)); err != nil {
		return nil, errors.Join(err, l.close())
	}
	return l, nil
}

// of makes the log file of a rank, nil without Job.LogDir.
func (l *logs) of(rank int) (io.Writer, error) {
	if l == nil {
		return nil, nil
	}
	return l.make(logName(rank))
}

// make makes a log file.
func (l *logs) make(name string) (*os.File, error) {
	f, err := l.dir.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o666)
	if err != nil {
		return nil, fmt.Errorf("make the log %s: %w", name, err)
	}
	l.files = append(l.files, f)
	return f, nil
}

// note writes a line with a timestamp to the launcher's log.
func (l *logs) note(what string) error {
	if l == nil {
		return nil
	}
	_, err := fmt.Fprintf(l.files[0], "%s %s\n",
		time.Now().UTC().Format("2006-01-02T15:04:05.000Z"), what)
	return err
}

// makeLogDir makes the directory of an attempt. Several machines may share Job.LogDir, so another
// launcher may have made it.
func (j Job) makeLogDir(attempt int) (*os.Root, error) {
	if err := os.MkdirAll(j.LogDir, 0o777); err != nil {
		return nil, fmt.Errorf("make the directory for logs: %w: name another one", err)
	}
	all, err := os.OpenRoot(j.LogDir)
	if err != nil {
		return nil, fmt.Errorf("open the directory for logs: %w", err)
	}
	defer all.Close()
	name := attemptDir(attempt)
	err = all.Mkdir(name, 0o777)
	if errors.Is(err, fs.ErrExist) && j.Machines == nil {
		return nil, earlierLogs(j.LogDir, name, err)
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make the directory for logs: %w: name another one", err)
	}
	dir, err := all.OpenRoot(name)
	if err != nil {
		return nil, fmt.Errorf("open the directory for logs: %w", err)
	}
	return dir, nil
}

func (l *logs) close() error {
	if l == nil {
		return nil
	}
	errs := []error{l.dir.Close()}
	for _, f := range l.files {
		if err := f.Close(); err != nil {
			errs = append(errs, fmt.Errorf("close a log: %w", err))
		}
	}
	return errors.Join(errs...)
}
