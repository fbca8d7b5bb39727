//go:build unix

package session

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/rendezvous"
)

func TestLauncherIsToldThatTheJobHasLostARank(t *testing.T) {
	read, write, err := os.Pipe()
	require.NoError(t, err)
	defer read.Close()
	where := placeOf(t, write)
	worlds := require.Value(rendezvous.Local(2, 0))(t)
	for _, w := range worlds {
		defer w.Close()
	}
	stop := reportDown(where, worlds[1])
	defer stop()
	reportDown("", worlds[1])() // nobody asks
	reportDown(where, worlds[0])()
	worlds[0].Fail(errors.New("out of\nmemory" + strings.Repeat(".", 2*maxReport)))
	got := make([]byte, 4*maxReport)
	n, err := read.Read(got)
	line := string(got[:n])
	require.Check(t, err == nil && strings.HasPrefix(line, "rank 0 failed: out of memory...") &&
		len(line) == maxReport+1 && line[maxReport] == '\n', "%q, %v", line, err)
	write.Close()
	more, err := io.ReadAll(read)
	require.Check(t, err == nil && len(more) == 0, "then %q, %v", more, err)
}

// placeOf is what a launcher says of a file.
func placeOf(t *testing.T, f *os.File) string {
	t.Helper()
	info := require.Value(f.Stat())(t)
	return fmt.Sprintf("%d:%d", f.Fd(), info.Sys().(*syscall.Stat_t).Ino)
}

func TestFilesOfTheUserTakeNoReport(t *testing.T) {
	path := filepath.Join(t.TempDir(), "mine")
	f := require.Value(os.Create(path))(t)
	defer f.Close()
	read, write, err := os.Pipe()
	require.NoError(t, err)
	defer read.Close()
	for _, where := range []string{placeOf(t, f), fmt.Sprintf("%d:1", write.Fd()),
		fmt.Sprintf("%d", write.Fd()), "x:1", "-1:1", ":"} {
		report(where, "rank 0 is down")
	}
	write.Close()
	text, err := io.ReadAll(read)
	require.Check(t, err == nil && len(text) == 0, "another pipe got %q, %v", text, err)
	if text, err := os.ReadFile(path); err != nil || len(text) > 0 {
		t.Errorf("the file holds %q, %v", text, err)
	}
}
