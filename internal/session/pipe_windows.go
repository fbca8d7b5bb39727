package session

// isPipe returns false: launchers on Windows do not ask for reports.
func isPipe(int, string) bool { return false }

func write(int, []byte) {}
