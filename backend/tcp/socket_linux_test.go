//go:build !portable && !netconn

package tcp

import (
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestOnlyLongWaysArePaced(t *testing.T) {
	l, _ := pair(t)
	if err := unix.SetsockoptString(l.sock.fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION,
		"bbr"); err != nil {
		t.Skip("this kernel has no BBR: ", err)
	}
	for _, c := range []struct {
		short time.Duration
		want  string
	}{{0, "bbr"}, {time.Hour, "reno"}} {
		require.NoError(t, avoidBBR(l.sock.fd, c.short))
		how, err := unix.GetsockoptString(l.sock.fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION)
		require.Check(t, err == nil && strings.TrimRight(how, "\x00") == c.want,
			"where ways of up to %v are short the congestion control is %q, %v, want %s", c.short,
			how, err, c.want)
	}
}
