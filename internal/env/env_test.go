package env

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/exit"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// set is an environment of one variable.
func set(name, text string) func(string) string {
	return func(asked string) string {
		if asked == name {
			return text
		}
		return ""
	}
}

func TestErrorsNameVariableValueAndWhatIsAllowed(t *testing.T) {
	for name, test := range map[string]struct{ text, use string }{
		"EURYALE_TLS":        {"yes", "use 1 or 0"},
		"EURYALE_CHECK":      {"no", "use on or off"},
		"EURYALE_LAST_CALLS": {"-1", "use a number of 0 or more"},
		"EURYALE_TIMEOUT":    {"0", "use a time above 0, such as 90s"},
	} {
		for _, v := range All() {
			if v.Name() != name {
				continue
			}
			err := v.Check(set(name, test.text))
			want := name + `="` + test.text + `": ` + test.use
			require.Check(t, err != nil && strings.HasPrefix(err.Error(), want),
				"the error is %v, want %s", err, want)
		}
	}
	err := Fault.Wrong("x", os.ErrInvalid)
	require.Equal(t, "Wrong", err.Error(), `EURYALE_FAULT="x": invalid argument`)
	require.Check(t, errors.Is(err, os.ErrInvalid) && exit.Of(err) == exit.Usage,
		"a wrong value ends a program with status %d, want %d", exit.Of(err), exit.Usage)
	_, err = Check.Read(set("EURYALE_CHECK", "x"))
	require.Equal(t, "the status for a wrong switch", exit.Of(err), exit.Usage)
}

func TestVariablesThatAreNotSetHaveTheirDefaults(t *testing.T) {
	none := func(string) string { return "" }
	for _, v := range All() {
		require.Report(t, v.Check(none))
	}
	d, err := Timeout.Read(none, time.Second)
	require.Check(t, d == time.Second && err == nil, "%v %v", d, err)
	on, err := Check.Read(none)
	require.Check(t, on && err == nil, "%v %v", on, err)
	n, err := Port.Read(none, 7)
	require.Check(t, n == 7 && err == nil, "%v %v", n, err)
}

func TestLibraryNamesAFileOrFilesOfADirectory(t *testing.T) {
	dir := t.TempDir()
	require.Slices(t, "Read", MPI.Read(set("EURYALE_MPI", dir), "a", "b"),
		[]string{filepath.Join(dir, "a"), filepath.Join(dir, "b")})
	require.Slices(t, "Read", MPI.Read(set("EURYALE_MPI", "/opt/libmpi.so"), "a"),
		[]string{"/opt/libmpi.so"})
	require.Check(t, CUDNN.Off(set("EURYALE_CUDNN", "off")) && !CUDNN.Off(set("EURYALE_CUDNN", "")),
		"off is not read")
}

func TestNamesAreUniqueAndExplained(t *testing.T) {
	seen := map[string]bool{}
	for _, v := range All() {
		require.Check(t, !seen[v.Name()] && v.Help != "" &&
			strings.HasPrefix(v.Name(), "EURYALE_") != v.Foreign, "%+v", v)
		seen[v.Name()] = true
	}
	require.Slices(t, "Unread",
		Unread([]string{"EURYALE_TIMOUT=1", "EURYALE_TEST_X=1", "EURYALE_TIMEOUT=1"}),
		[]string{"EURYALE_TIMOUT"})
}
