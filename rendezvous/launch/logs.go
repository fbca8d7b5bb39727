package launch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// checkLogs returns an error if dir holds logs of an earlier job: they must be neither
// overwritten nor mixed with new ones.
func checkLogs(dir string) error {
	if dir == "" {
		return nil
	}
	if _, err := os.Lstat(attemptDir(dir, 0)); err == nil {
		return fmt.Errorf("directory %s holds the logs of an earlier job: remove them, or name another directory", dir)
	}
	return nil
}

func attemptDir(dir string, attempt int) string {
	return filepath.Join(dir, fmt.Sprintf("attempt_%d", attempt))
}

// openLogs makes the log files of an attempt, one for each rank; none if dir is "".
func openLogs(dir string, attempt, first, ranks int) (logs []*os.File, err error) {
	if dir == "" {
		return nil, nil
	}
	dir = attemptDir(dir, attempt)
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return nil, fmt.Errorf("make the directory for logs: %w", err)
	}
	for r := first; r < first+ranks; r++ {
		f, err := os.Create(filepath.Join(dir, fmt.Sprintf("rank_%d.log", r)))
		if err != nil {
			return nil, errors.Join(fmt.Errorf("make the log of rank %d: %w", r, err), closeLogs(logs))
		}
		logs = append(logs, f)
	}
	return logs, nil
}

func closeLogs(logs []*os.File) error {
	var errs []error
	for _, f := range logs {
		if err := f.Close(); err != nil {
			errs = append(errs, fmt.Errorf("close a log: %w", err))
		}
	}
	return errors.Join(errs...)
}
