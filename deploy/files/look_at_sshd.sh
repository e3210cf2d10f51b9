# Every reason why password logins may still be possible, or one line: shut. $file is spotune's drop-in.
reasons=$(
  open_logins
  [ ! -e "$file.new" ] || echo 'new settings that sshd has not taken up'
)
echo "${reasons:-shut}"
