//go:build unix

package observe_test

import (
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/require"
	"github.com/euryale-ml/euryale/observe"
)

// said is a Writer whose texts a test receives.
type said chan string

func (s said) Write(text []byte) (int, error) {
	s <- string(text)
	return len(text), nil
}

func TestLastCallsAreWrittenOnQuitWhichThenGoesOn(t *testing.T) {
	quit, out := make(chan os.Signal, 2), make(said, 2)
	signal.Notify(quit, syscall.SIGQUIT) // or the signal would end this process
	defer signal.Stop(quit)
	recorder := observe.New(3, 8)
	recorder.WriteLastOnQuit(out, 0)() // nobody asks
	ended := recorder.WriteLastOnQuit(out, 2)
	ended()
	defer recorder.WriteLastOnQuit(out, 2)()
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGQUIT))
	for range 2 { // the signal itself, and once it is passed on
		<-quit
	}
	if text := <-out; !strings.HasPrefix(text, "rank 3: the last 0 of 0 collectives") ||
		len(out) > 0 {
		t.Errorf("%q, and %d more", text, len(out))
	}
}
