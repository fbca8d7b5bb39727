//go:build linux

package launch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// copyOf is a job on host a whose program, a copy in the cache, runs a script.
func copyOf(t *testing.T, script string, ranks int) (Job, *output) {
	t.Helper()
	program := filepath.Join(t.TempDir(), "program")
	require.NoError(t, os.WriteFile(program, []byte(script), 0o700))
	job, out, _ := onHosts(t, "", ranks, "a")
	job.Program, job.Args, job.Hosts[0].Slots = program, nil, ranks
	return job, out
}

func TestCopiesThatALiveJobUsesStay(t *testing.T) {
	homes := fakeSSH(t, "")
	over := filepath.Join(homes, "over")
	job, out := copyOf(t, "echo up; until [ -e "+over+" ]; do sleep 0.02; done", 1)
	ended := make(chan error, 1)
	go func() { ended <- Run(t.Context(), job) }()
	out.await(t, 1, "up")
	dir := homes + "/a/.cache/euryale/run/"
	used, err := filepath.Glob(dir + "*")
	require.That(t, err == nil && len(used) == 2, "%q, %v", used, err)
	hour := time.Now().Add(time.Hour)
	for n := range keptCopies + 3 { // later ones, and others of long ago
		later, old := fmt.Sprint(dir, "sha256-later", n), fmt.Sprint(dir, "sha256-old", n)
		err = errors.Join(err, os.Mkdir(later, 0o700), os.Chtimes(later, hour, hour),
			os.Mkdir(old, 0o700), os.Chtimes(old, time.Unix(1, 0), time.Unix(1, 0)))
	}
	require.NoError(t, err)
	other, _ := copyOf(t, "exit", 1)
	require.Report(t, Run(t.Context(), other))
	left, err := filepath.Glob(dir + "*")
	require.Check(t, err == nil && slices.Contains(left, used[0]) &&
		slices.Contains(left, used[1]) && len(left) <= keptCopies+3 &&
		!strings.Contains(fmt.Sprint(left), "old"), "%d are left: %q, %v", len(left), left, err)
	require.NoError(t, errors.Join(os.WriteFile(over, nil, 0o600), <-ended))
}

// TestACopyIsStartedWhateverOthersMakeOfItsPath: what others have put there might run instead when
// a process is replaced.
func TestACopyIsStartedWhateverOthersMakeOfItsPath(t *testing.T) {
	homes := fakeSSH(t, "")
	job, out := copyOf(t, `n=${EURYALE_ELASTIC#*'"Process":'}
		await() { until [ -e `+homes+`/$1 ]; do sleep 0.02; done; }
		case ${n%%,*} in
		1) await over;;
		2) echo up; await moved; exit 3;;
		3) echo good; touch `+homes+`/over;;
		esac`, 2)
	job.Elastic = &Elastic{Least: 1}
	ended := make(chan error, 1)
	go func() { ended <- Run(t.Context(), job) }()
	out.await(t, 1, "up")
	cache := homes + "/a/.cache"
	err := os.Rename(cache, homes+"/elsewhere")
	copies, _ := filepath.Glob(homes + "/elsewhere/euryale/run/*/program")
	for _, path := range copies {
		evil := filepath.Join(cache, strings.TrimPrefix(path, homes+"/elsewhere"))
		err = errors.Join(err, os.MkdirAll(filepath.Dir(evil), 0o700), os.WriteFile(evil,
			[]byte("echo evil; touch "+homes+"/over"), 0o700))
	}
	require.That(t, err == nil && len(copies) == 1, "%v %v", copies, err)
	err = errors.Join(os.WriteFile(homes+"/moved", nil, 0o600), <-ended)
	require.Check(t, err == nil && strings.Contains(out.String(), "good"), "%v, %s", err, out)
}

func TestACacheBelowAFolderWithTheStickyBitIsUsed(t *testing.T) {
	homes := fakeSSH(t, "")
	home := homes + "/a"
	err := errors.Join(os.Mkdir(home, 0o700), os.Chmod(home, 0o777|os.ModeSticky))
	job, out := copyOf(t, "echo up", 1)
	err = errors.Join(err, Run(t.Context(), job))
	require.Check(t, err == nil && out.String() == "[0] up\n", "%v, %s", err, out)
}
