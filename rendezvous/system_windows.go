package rendezvous

import (
	"errors"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/windows"
	"golang.org/x/sys/windows/registry"
)

// The system's errors for an address that cannot be listened on.
const (
	errAddrInUse    = windows.WSAEADDRINUSE
	errAddrNotAvail = windows.WSAEADDRNOTAVAIL
)

// hangUps are the errors of a connection that the other side has ended.
func hangUps() []error { return []error{windows.WSAECONNRESET, windows.WSAECONNABORTED} }

// mostFiles returns a number that bounds nothing: Windows has no such limit.
func mostFiles() uint64 { return mostUnproven * unprovenShare }

// ownerOf returns this user: temporary directories and the cache are inside a user's profile.
func ownerOf(os.FileInfo) int { return os.Getuid() }

// isPrivate returns true: files have no modes. See ownerOf.
func isPrivate(os.FileInfo) bool { return true }

// replace renames a file to the name of another, which it replaces. While a rank reads that one,
// Windows keeps its name, and replace waits.
func replace(from, to string) error {
	for end := time.Now().Add(expireTime); ; time.Sleep(time.Millisecond) {
		err := os.Rename(from, to)
		if err == nil || time.Now().After(end) || !errors.Is(err, windows.ERROR_ACCESS_DENIED) &&
			!errors.Is(err, windows.ERROR_SHARING_VIOLATION) {
			return err
		}
	}
}

// bootID tells apart machines with the same name: it returns the ID that Windows gave this one.
func bootID() (boot string, memory uint64) {
	key, err := registry.OpenKey(registry.LOCAL_MACHINE, `SOFTWARE\Microsoft\Cryptography`,
		registry.QUERY_VALUE)
	if err != nil {
		return "", 0 // names alone tell machines apart then
	}
	defer key.Close()
	boot, _, _ = key.GetStringValue("MachineGuid")
	return strings.TrimSpace(boot), 0
}
