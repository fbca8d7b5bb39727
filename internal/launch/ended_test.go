//go:build linux

package launch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestFoundRankThatEndsBeforeItJoinsEndsTheJobAtOnce(t *testing.T) {
	for _, rank := range []int{0, 1} {
		t.Run(fmt.Sprint("rank ", rank), func(t *testing.T) {
			dir := t.TempDir()
			t.Setenv("XDG_RUNTIME_DIR", dir)
			var errs output
			job := Job{
				Program: "/bin/sh", Args: []string{"-c",
					fmt.Sprintf(`test "$RANK" = %d || exec "$0"`, rank), os.Args[0]}, Ranks: 3,
				Env: append(os.Environ(), asHelper+"=rank", "EURYALE_TIMEOUT=20s"), Stderr: &errs,
			}
			started := time.Now()
			err := Run(t.Context(), job)
			took := time.Since(started)
			require.Check(t, err != nil && took <= long/2, "the job ended after %v: %v", took, err)
			if want := fmt.Sprintf("rank %d is down: its process ended with exit status 0 before "+
				"it joined", rank); !strings.Contains(errs.String(), want) {
				t.Errorf("%q lacks %q", errs.String(), want)
			}
			left, _ := filepath.Glob(filepath.Join(dir, "euryale", "*"))
			require.Check(t, len(left) == 0, "left behind: %v", left)
		})
	}
}

func TestFoundMeetingOfAKilledJobIsSwept(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("XDG_RUNTIME_DIR", dir)
	// Rank 0 publishes its address and is killed; the others have never begun.
	job := Job{
		Program: "/bin/sh", Ranks: 2, Env: append(os.Environ(), asHelper+"=rank"),
		Args: []string{"-c", `test "$RANK" = 1 && exec sleep 100
			"$0" & while ! ls "$XDG_RUNTIME_DIR"/euryale/*.lock >&2; do :; done 2>/dev/null
			kill -9 $! $$`, os.Args[0]},
	}
	require.Fails(t, "the job ended well", Run(t.Context(), job))
	left, _ := filepath.Glob(filepath.Join(dir, "euryale", "*"))
	require.Check(t, len(left) == 0, "left behind: %v", left)
}

// Rank 1 ends, so rank 0 does. Rank 2 comes only then, and must not take rank 0 for
// the cause.
func TestFoundLateRankLearnsWhichRankEndedFirst(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("XDG_RUNTIME_DIR", dir)
	var errs output
	job := Job{
		Program: "/bin/sh", Ranks: 3, Env: append(os.Environ(), asHelper+"=rank",
			"EURYALE_TIMEOUT=20s"), Stderr: &errs,
		Args: []string{"-c", `case "$RANK" in
			0) "$0"; code=$?; touch "$XDG_RUNTIME_DIR/over"; exit $code;;
			1) exit 4;;
			2) until test -e "$XDG_RUNTIME_DIR/over"; do sleep 0.01; done; exec "$0";;
			esac`, os.Args[0]},
	}
	err := Run(t.Context(), job)
	var f *Failed
	require.Check(t, errors.As(err, &f) && f.Rank == 1, "the job ended with %v", err)
	for line := range strings.Lines(errs.String()) {
		if strings.HasPrefix(line, "[2] panic: ") &&
			!strings.Contains(line, "rank 1 is down: its process ended with exit status 4") {
			t.Errorf("rank 2 said %q", line)
		}
	}
}
