package exit

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

// coded is an error with an exit status.
type coded int

func (coded) Error() string   { return "coded" }
func (c coded) ExitCode() int { return int(c) }

// rows are the first cells of the table of a page.
var rows = regexp.MustCompile(`(?m)^\| (\d+)( \+ n)? \|`)

// TestThePageHasEveryStatus: it has a row for each constant, and no other.
func TestThePageHasEveryStatus(t *testing.T) {
	page := require.Value(os.ReadFile("../../docs/running.md"))(t)
	_, section, _ := strings.Cut(string(page), "\n## Exit statuses\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var listed, constants []string
	for _, row := range rows.FindAllStringSubmatch(section, -1) {
		listed = append(listed, row[1])
	}
	file := require.Value(parser.ParseFile(token.NewFileSet(), "exit.go", nil, 0))(t)
	first := file.Decls[slices.IndexFunc(file.Decls, func(d ast.Decl) bool {
		is, ok := d.(*ast.GenDecl)
		return ok && is.Tok == token.CONST
	})]
	for _, spec := range first.(*ast.GenDecl).Specs {
		constants = append(constants, spec.(*ast.ValueSpec).Values[0].(*ast.BasicLit).Value)
	}
	require.Check(t, slices.Equal(listed, constants) && len(constants) >= 2,
		"the page lists %v, and the constants are %v", listed, constants)
}

func TestAStatusIsThatOfTheErrorAndNeverThatOfSuccess(t *testing.T) {
	for _, test := range []struct {
		err  error
		want int
	}{
		{nil, Finished}, {errors.New("broken"), Failed}, {coded(7), 7}, {coded(0), Failed},
		{coded(-1), Failed}, {coded(256), Failed}, {Stopped(143), 143},
		{fmt.Errorf("fit: %w", errors.Join(Stopped(130), errors.New("closed"))), 130},
	} {
		require.Equal(t, test.err, Of(test.err), test.want)
	}
}

func TestAContextSaysWhichSignalHasEndedIt(t *testing.T) {
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		ctx, stop := signal.NotifyContext(t.Context(), s)
		require.Equal(t, "nothing has ended it", By(ctx), 0)
		self, err := os.FindProcess(os.Getpid())
		if err == nil {
			err = self.Signal(s)
		}
		if err != nil {
			t.Skip(err) // as on Windows
		}
		<-ctx.Done()
		below, end := context.WithCancel(ctx)
		end()
		got := By(below)
		require.Check(t, got == Stopped(Signal+int(s)) && errors.Is(got, ErrStopped) &&
			strings.Contains(got.Error(), s.String()), "%v: %d, %v", s, got, got)
		stop()
	}
}

func TestAContextThatNoSignalEndsIsUnfinished(t *testing.T) {
	ctx, end := context.WithTimeout(t.Context(), time.Nanosecond)
	defer end()
	<-ctx.Done()
	if got := By(ctx); got != Unfinished || !errors.Is(got, ErrStopped) ||
		got.Error() != ErrStopped.Error() {
		t.Errorf("%d, %v", got, got)
	}
	for cause, want := range map[coded]Stopped{143: 143, Failed: Unfinished, Usage: Unfinished} {
		ctx, end := context.WithCancelCause(t.Context())
		end(cause)
		require.Equal(t, fmt.Sprint("cause ", cause), By(ctx), want)
	}
}
